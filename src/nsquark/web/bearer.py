"""Makes the header by which a client shows its secret."""


def bearer(secret: str) -> dict[str, str]:
    """Makes the header that shows a secret, or none without one; its UTF-8 stands as Latin-1, which HTTP clients send.
    A secret that is not printable is a ValueError.
    """
    if not secret:
        return {}
    if not secret.isprintable():
        raise ValueError("the secret has characters that cannot be sent in a header")
    return {"Authorization": "Bearer " + secret.encode().decode("latin-1")}
