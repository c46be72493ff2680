"""Checks that docs/client-reference.md is what the docstrings say now, and that they say something of everything."""

from .reference import PUBLIC, REFERENCE, Reference


def test_everything_public_is_explained_and_the_reference_is_up_to_date() -> None:
    made = Reference()
    assert not made.problems, "\n".join(made.problems)
    assert REFERENCE.read_text() == made.text, "run `make reference`"


def test_what_the_package_exports_is_in_the_reference() -> None:
    import nsquark

    missing = {name for name in nsquark.__all__ if name not in ("errors", "sync")} - set(PUBLIC["nsquark"])
    assert not missing


def test_a_blocking_form_says_of_its_methods_what_its_own_model_says() -> None:
    import nsquark

    for name in ("publish", "multi_publish", "publish_nowait", "ping", "outstanding"):
        for form, model in (
            (nsquark.sync.Producer, nsquark.Producer),
            (nsquark.sync.ProducerPool, nsquark.ProducerPool),
        ):
            assert getattr(form, name).__doc__ == getattr(model, name).__doc__
