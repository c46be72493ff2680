"""Makes the header by which a client shows its secret."""


def bearer(secret: str) -> dict[str, str]:
    """Makes the headers that show a secret; none without one. ValueError if HTTP clients, which send Latin-1, cannot
    send it.
    """
    if not secret:
        return {}
    if not secret.isprintable():
        raise ValueError("the secret has characters that cannot be sent in a header")
    return {"Authorization": "Bearer " + secret.encode().decode("latin-1")}
