from collections.abc import Iterator

import pytest

from tests.failing import Nursery


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Starts jobs of ranks that fail; checks at the end that none is left."""
    nursery = Nursery(tmp_path_factory.mktemp("ranks"))
    yield nursery
    assert not nursery.survivors()
    nursery.close()
