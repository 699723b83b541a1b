"""The text of the examples, which takes a second to load."""

import pytest

from examples.shared.byte_models import Corpus, load_corpus


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return load_corpus()
