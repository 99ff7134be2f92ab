"""Staleness measures against snapshots of the weights and the whole model's gradients; nothing else
changes."""

from dataclasses import dataclass

import pytest
import torch

from brx.config import user_code
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.model.stage import whole_model
from brx.plot.any_runs import draw_staleness
from brx.runs.export import export
from brx.runs.metrics import read_staleness
from brx.train.build import assemble
from brx.train.loop import train
from brx.train.staleness import _cosine, mean_angle_degrees
from tests.pipeline.test_engine import VOCABULARY, make_config, micro_batch
from tests.train.helpers import losses, tiny_config

pytestmark = pytest.mark.usefixtures("own_code")

PLAIN_SGD = ["optimizer.arguments={}", "training.clip=1e9", "training.warmup_fraction=0.0"]


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).double()


def update_of(versions, k, t):
    return flat(versions[t][k].values()) - flat(versions[t - 1][k].values())


def cosine(one, other):
    return float(one @ other / one.norm() / other.norm())


def run_with_snapshots(config, iterations):
    """Weights by name before iteration 1, after 1, ..., and the measures of every iteration."""
    assembly = assemble(config, micro_batch)

    def weights():
        return [
            {name: w.detach().clone() for name, w in stage.newest.items()}
            for stage in assembly.stages
        ]

    snapshots, measures = [weights()], [{}]
    for result in assembly.engine.run(1, lambda: iterations):
        snapshots.append(weights())
        measures.append(assembly.probe.take(result.iteration))
    return snapshots, measures


AGES = {
    (1, "pipeline"): ([3], [2], [1], [0]),
    (1, "[2, 0, 1, 0]"): ([2], [0], [1], [0]),
    (2, "pipeline"): ([2, 1], [1, 1], [1, 0], [0, 0]),
    (2, "[5, 3, 2, 1]"): ([3, 2], [2, 1], [1, 1], [1, 0]),
    (2, "2bw"): ([1, 1], [1, 1], [1, 1], [1, 1]),
    (4, "pipeline"): ([1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]),
}
"""By M and delays, and by stage: how many updates the weights of each of an update's micro-batches
are behind the newest, counted in the tables of docs/semantics.md (M = 4) and in ones written out by
hand."""


CASES = [
    *((*case, "stash=exact") for case in AGES),
    (1, "pipeline", "stash=predict"),
    (2, "pipeline", "stash=none"),
    (2, "2bw", "rings=host"),
]


@dataclass(frozen=True)
class Probed:
    """A run of 12 updates with staleness measured at every fourth."""

    config: RunConfig
    ages: tuple[list[int], ...]  # by stage: see `AGES`
    versions: list[list[dict[str, torch.Tensor]]]  # after each update, by stage
    measures: list[dict[str, list[float]]]  # of each update


@pytest.fixture(scope="module", params=CASES, ids=str)
def probed(request):
    accumulation, delay, mode = request.param
    settings = [
        f"pipeline.accumulation={accumulation}",
        f"pipeline.delay={delay}",
        f"pipeline.{mode}",
        *PLAIN_SGD,
    ]
    with user_code.allowed():
        config = make_config(
            "torch.optim:SGD", 4, "exact", 24, "logging.staleness_every=4", *settings
        )
        versions, measures = run_with_snapshots(config, 12)
    return Probed(config, AGES[accumulation, delay], versions, measures)


def test_staleness_is_measured_when_due(probed):
    assert [t for t, measure in enumerate(probed.measures) if measure] == [4, 8, 12]


T = 8
"""The update whose measures are compared."""


def test_gradient_cosine_is_to_the_fresh_gradient(probed):
    newest, accumulation = probed.versions[T - 1], probed.config.pipeline.accumulation
    own = range((T - 1) * accumulation + 1, T * accumulation + 1)
    fresh = fresh_gradients(probed.config, newest, own)
    for k, measured in enumerate(probed.measures[T]["stage_gradient_cosine"]):
        # Without momentum, decay and clipping, the update is the delayed gradient times -lr.
        delayed_gradient = -update_of(probed.versions, k, T)
        expected = cosine(delayed_gradient, flat(fresh[name] for name in newest[k]))
        assert measured == pytest.approx(expected, abs=1e-4)


def test_update_cosine_is_to_the_oldest_update(probed):
    measures = probed.measures[T]["stage_update_cosine"]
    for k, ages in enumerate(probed.ages):
        expected = None
        if max(ages) > 0:
            oldest = update_of(probed.versions, k, T - max(ages))
            expected = cosine(update_of(probed.versions, k, T), oldest)
        assert measures[k] == pytest.approx(expected, abs=1e-4)


def test_weight_distance_is_the_mean_over_micro_batches(probed):
    measures = probed.measures[T]["stage_weight_distance"]
    for k, ages in enumerate(probed.ages):
        newest = flat(probed.versions[T - 1][k].values())
        used = [flat(probed.versions[T - 1 - age][k].values()) for age in ages]
        distances = [float((newest - weights).norm() / newest.norm()) for weights in used]
        assert measures[k] == pytest.approx(sum(distances) / len(ages), rel=1e-3, abs=1e-9)


def test_weights_are_distant_where_they_are_old(probed):
    are_distant = [distance > 0 for distance in probed.measures[T]["stage_weight_distance"]]
    assert are_distant == [max(ages) > 0 for ages in probed.ages]


def fresh_gradients(config, weights, micro_batches):
    """By name: the mean over micro-batches of the whole model's gradients, at weights given by
    stage."""
    model = whole_model(config.model, VOCABULARY, seed=0)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(next(stage[name] for stage in weights if name in stage))
    for n in micro_batches:
        (model(*micro_batch(n)).loss / len(micro_batches)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


MATRICES = ("query", "key", "value", "attention.projection", "up", "down")


@pytest.mark.parametrize(
    ("method", "mixture"),
    [("pipedream", "{experts: 2}"), ("basis-rotation", "null"), ("muon", "{experts: 2}")],
)
def test_sign_changes_count_the_same_matrices(method, mixture):
    config = make_config(
        method,
        4,
        "exact",
        24,
        "model.blocks=8",
        "logging.staleness_every=4",
        f"model.moe={mixture}",
    )
    versions, measures = run_with_snapshots(config, 8)
    of_matrices = tuple(f".{matrix}.weight" for matrix in MATRICES)
    for k in range(4):
        earlier, before, now = (versions[t][k] for t in (6, 7, 8))
        names = [name for name in now if name.endswith(of_matrices)]
        assert len(names) == 2 * len(MATRICES)  # two blocks per stage, neither embeddings nor head
        changes = [
            (now[name] - before[name]).sign() != (before[name] - earlier[name]).sign()
            for name in names
        ]
        share = float(torch.cat([each.flatten() for each in changes]).double().mean())
        assert measures[8]["stage_sign_changes"][k] == pytest.approx(share, rel=1e-6)


def test_distance_is_to_the_forecast_weights():
    settings = ["logging.staleness_every=4", "pipeline.forecast=last-update", *PLAIN_SGD]
    versions, measures = run_with_snapshots(
        make_config("torch.optim:SGD", 4, "exact", 24, *settings), 8
    )
    for k, tau in enumerate([3, 2, 1]):
        newest, last, before = (flat(versions[v][k].values()) for v in (7, 7 - tau, 6 - tau))
        expected = float((newest - (last + tau * (last - before))).norm() / newest.norm())
        assert measures[8]["stage_weight_distance"][k] == pytest.approx(expected, rel=1e-3)


@pytest.fixture(scope="module")
def undelayed():
    """The measures of an update without delay."""
    config = make_config("pipedream", 1, "exact", 24, "logging.staleness_every=5")
    return run_with_snapshots(config, 5)[1][5]


def test_gradients_without_delay_are_fresh(undelayed):
    assert undelayed["stage_gradient_cosine"] == [pytest.approx(1.0, abs=1e-6)]


def test_weights_without_delay_have_no_distance(undelayed):
    assert undelayed["stage_weight_distance"] == [0.0]


def test_method_without_bases_has_no_angle(undelayed):
    assert "stage_basis_angle" not in undelayed


@pytest.fixture(scope="module")
def rotated():
    """The measures of an update with a refresh: 36 is a multiple of the frequency, 3."""
    settings = ["logging.staleness_every=12", "optimizer.geometry=bilateral"]
    config = make_config("basis-rotation", 2, "exact", 40, *settings)
    return run_with_snapshots(config, 36)[1][36]


def test_refresh_turns_every_stages_bases(rotated):
    assert all(0 < angle < 90 for angle in rotated["stage_basis_angle"])


def test_signs_change_in_the_basis(rotated):
    assert all(0 < share < 1 for share in rotated["stage_rotated_sign_changes"])


def test_angle_of_a_known_rotation():
    angle = torch.deg2rad(torch.tensor(30.0))
    cos, sin = angle.cos(), angle.sin()
    turned = torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])])
    assert mean_angle_degrees(torch.eye(2), turned) == pytest.approx(30.0, abs=1e-3)


def test_stage_without_gradients_has_no_cosine():
    assert _cosine([None], [torch.ones(2)]) is None


def test_swapped_or_negative_columns_are_no_turn():
    swapped = -torch.eye(2)[:, [1, 0]]
    assert mean_angle_degrees(torch.eye(2), swapped) == pytest.approx(0.0, abs=1e-3)


MEASURED = [
    "optimizer.method=basis-rotation",
    "pipeline.stash=predict",
    "optimizer.frequency=3",
    "logging.staleness_every=6",
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The records of a run that measures every six iterations."""
    folder = tmp_path_factory.mktemp("measured")
    train(tiny_config(folder, *MEASURED), folder / "run")
    return losses(folder / "run")


def test_measures_come_every_six_iterations(measured):
    at = [record["iteration"] for record in measured if "stage_gradient_cosine" in record]
    assert at == [6, 12, 18, 24, 30]


def test_measuring_changes_no_other_number(measured, tmp_path):
    train(tiny_config(tmp_path, *MEASURED[:-1]), tmp_path / "run")
    plain = losses(tmp_path / "run")
    assert len(plain) == len(measured)
    for record, with_measures in zip(plain, measured, strict=True):
        assert {key: with_measures[key] for key in record} == record


def test_resumed_run_has_the_same_measures(measured, tmp_path):
    train(tiny_config(tmp_path, *MEASURED, "training.stop_after=12"), tmp_path / "run")
    train(tiny_config(tmp_path, *MEASURED), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == measured


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run with measures."""
    folder = tmp_path_factory.mktemp("short")
    settings = ["logging.staleness_every=2", "training.iterations=6"]
    train(tiny_config(folder, *settings), folder / "run")
    return folder / "run"


def test_figure_has_files(run, tmp_path):
    files = draw_staleness([run], tmp_path / "figure")
    assert all(file.stat().st_size > 0 for file in files)


def test_exported_run_keeps_its_measures(run, tmp_path):
    export(run, tmp_path / "compact")
    assert not (tmp_path / "compact" / "metrics.jsonl").exists()
    assert read_staleness(tmp_path / "compact") == read_staleness(run) != []


def test_figure_of_runs_without_measures_is_refused(tmp_path):
    train(tiny_config(tmp_path, "training.iterations=1"), tmp_path / "none")
    told = r"none: no staleness was measured; train with logging\.staleness_every"
    with pytest.raises(UserError, match=told):
        draw_staleness([tmp_path / "none"], tmp_path / "figure")


def test_several_devices_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"logging\.staleness_every needs pipeline\.devices 1"):
        tiny_config(tmp_path, "logging.staleness_every=5", "pipeline.devices=2")
