import pytest

from tests.curvature.helpers import finished_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Two finished runs of the same model: pipedream and basis-rotation. Read only; `copied` gives a copy."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "pipedream": finished_run(folder, "pipedream"),
        "basis-rotation": finished_run(
            folder, "basis-rotation", "optimizer.method=basis-rotation", "optimizer.frequency=3"
        ),
    }
