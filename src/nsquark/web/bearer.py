"""The header by which a client shows its secret."""


def bearer(secret: str) -> dict[str, str]:
    """For HTTP clients, which send headers as Latin-1; nothing without a secret. ValueError if it cannot be sent."""
    if not secret:
        return {}
    if not secret.isprintable():
        raise ValueError("the secret has characters that cannot be sent in a header")
    return {"Authorization": "Bearer " + secret.encode().decode("latin-1")}
