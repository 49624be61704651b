"""Leases of a script that knows nothing of them."""

from __future__ import annotations

import _signal
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.checkpoint import checkpoint

from stretto import variable_names
from stretto.background import script_leases
from stretto.background.child_processes import ChildProcesses
from stretto.background.foreground import Foreground
from stretto.background.lease import Background
from stretto.background.script_leases import ScriptLeases
from stretto.cli.run import command
from stretto.errors import SpecError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def background(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))
    with Background("cpu:6", isolates=False) as made:
        yield made


@pytest.fixture
def words(background, monkeypatch):
    found = []
    wait, end = background.wait, background.end_task

    def noted_wait(label="", **options):
        found.append(label)
        return wait(label, **options)

    def noted_end():
        if background._is_open:
            found.append("end")
        end()

    monkeypatch.setattr(background, "wait", noted_wait)
    monkeypatch.setattr(background, "end_task", noted_end)
    return found


@pytest.fixture
def leases(background, words):
    made = []

    def make(segments):
        made.append(ScriptLeases(background, segments=segments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, micro_batches=1):
    optimizer.zero_grad()
    for i in range(micro_batches):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(i))
        model(x).square().mean().backward()
    optimizer.step()


def test_a_micro_batch_is_one_lease(leases, words):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    assert words == ["Sequential", "end"]
    words.clear()
    step(model, optimizer, micro_batches=2)
    assert words == ["Sequential", "Sequential", "end", "end"]


def test_a_lease_ends_with_a_backward_that_is_not_the_last_before_a_step(leases, words):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    step(model, optimizer, micro_batches=3)
    words.clear()
    step(model, optimizer, micro_batches=3)
    assert words == ["Sequential", "end"] * 3


def test_each_optimizers_next_step_is_expected_after_its_own_backwards(leases, words):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        words.clear()
        step(model, optimizer, micro_batches=2)
        step(model, other, micro_batches=1)
    assert words == ["Sequential", "end"] * 3


def test_a_step_that_comes_early_takes_a_lease_of_its_own(leases, words):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    step(model, optimizer, micro_batches=2)
    words.clear()
    step(model, optimizer)
    assert words == ["Sequential", "end", "SGD step", "end"]


def test_a_second_optimizers_step_takes_a_lease(leases, words):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    torch.optim.Adam(model.parameters()).step()
    assert words == ["Sequential", "end", "Adam step", "end"]


def test_a_closures_backward_does_not_end_the_lease_of_its_step(leases, background):
    leases("micro-batch")
    model, _ = model_and_optimizer()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    open_after = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        open_after.append(background.has_lease)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert all(open_after)
    assert not background.has_lease


def test_forwards_whose_outputs_are_not_used_end_their_leases(leases, words):
    leases("micro-batch")
    model, _ = model_and_optimizer()
    for _ in range(3):
        words.clear()
        loss = model(torch.ones(2, 4)).sum().item()
    assert loss
    assert words == ["Sequential", "end"]


@pytest.mark.parametrize("with_step", [True, False])
def test_outputs_are_freed_as_soon_as_the_script_drops_them(leases, with_step):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    gc.disable()
    try:
        out = model(torch.ones(2, 4))
        dropped = weakref.ref(out)
        out.sum().backward()
        if with_step:
            optimizer.step()
        del out
        assert dropped() is None
    finally:
        gc.enable()


def test_evaluation_with_gradients_between_steps_ends_its_leases(leases, words):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    for _ in range(3):
        words.clear()
        step(model.train(), optimizer)
        loss = model.eval()(torch.ones(2, 4)).sum().item()
    assert loss
    assert words == ["Sequential", "end", "Sequential in evaluation", "end"]


def test_a_backward_takes_a_lease_if_none_was_expected(leases, words):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    for _ in range(2):
        model(torch.ones(2, 4))
    step(model, optimizer)  # its output is expected to be unused
    words.clear()
    step(model, optimizer)
    assert words == ["Sequential", "end"]


def test_an_output_that_a_loss_was_computed_of_awaits_its_backward(leases, words):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    for _ in range(2):
        words.clear()
        losses = [model(torch.ones(2, 4)).sum() for _ in range(2)]
        sum(losses).backward()
        optimizer.step()
    assert words == ["Sequential", "Sequential", "end", "end"]


def test_a_model_that_a_loss_follows_keeps_its_lease_until_then(leases, words):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    criterion = nn.MSELoss()
    for _ in range(3):
        words.clear()
        criterion(model(torch.ones(2, 4)), torch.ones(2, 3)).backward()
        optimizer.step()
    assert words == ["Sequential", "MSELoss", "end", "end"]


def test_a_frozen_model_ends_its_lease_with_gradients_on_too(leases, words):
    leases("micro-batch")
    model, _ = model_and_optimizer()
    model.requires_grad_(False)
    model(torch.ones(2, 4))
    assert words == ["Sequential", "end"]


class Checkpointed(nn.Module):
    """A model that computes its forward again in backward."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layers = model_and_optimizer()[0]

    def forward(self, x):
        out = checkpoint(self.layers, x, use_reentrant=self.use_reentrant)
        return {"out": out}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_backward_that_computes_a_forward_again_keeps_its_lease(
    leases, words, use_reentrant
):
    leases("micro-batch")

    model = Checkpointed(use_reentrant=use_reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        words.clear()
        x = torch.ones(2, 4, requires_grad=True)
        model(x)["out"].square().mean().backward()
        assert words == ["Checkpointed"]
        optimizer.step()
    assert words == ["Checkpointed", "end"]


class Nested(nn.Module):
    """A module that calls itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, depth):
        return self.layer(self(x, depth - 1) if depth else x)


def test_a_module_that_calls_itself_has_one_lease(leases, words):
    leases("micro-batch")
    with torch.no_grad():
        Nested()(torch.ones(2, 4), 2)
    assert words == ["Nested without gradients", "end"]


def test_a_forward_without_gradients_ends_its_lease(leases, words):
    leases("micro-batch")
    model, _ = model_and_optimizer()
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert words == ["Sequential without gradients", "end"]


def test_a_layer_is_a_lease_in_forward_and_in_backward(leases, words):
    leases("layer")
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    waits = [word for word in words if word != "end"]
    assert waits == [
        "Sequential",
        *(f"Sequential {i}" for i in (1, 2, 3)),
        *(f"Sequential {i} backward" for i in (3, 2, 1)),
    ]
    assert words[-1] == "end"


class Token(nn.Module):
    """A layer whose output is its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x):
        del x
        return self.weight


def test_a_layer_that_returns_a_parameter_takes_no_more_leases_in_each_step(
    leases, words
):
    leases("layer")
    model = nn.Sequential(Token(), nn.Linear(5, 3))
    counts = []
    for _ in range(3):
        words.clear()
        model(torch.ones(2, 4)).sum().backward()
        counts.append(sum(word != "end" for word in words))
    assert len(set(counts)) == 1


@pytest.mark.parametrize("segments", ["micro-batch", "layer"])
def test_training_is_equal_bit_for_bit(leases, segments):
    plain, optimizer = model_and_optimizer()
    for _ in range(3):
        step(plain, optimizer, micro_batches=2)
    hooks = leases(segments)
    leased, optimizer = model_and_optimizer()
    for _ in range(3):
        step(leased, optimizer, micro_batches=2)
    hooks.close()
    for one, two in zip(plain.parameters(), leased.parameters(), strict=True):
        assert torch.equal(one, two)


def test_an_error_in_forward_leaves_the_next_forward_a_lease(leases, words):
    leases("micro-batch")
    model, _ = model_and_optimizer()
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 9))
    model(torch.ones(2, 4))
    assert [w for w in words if w != "end"] == ["Sequential", "Sequential"]


def test_a_forward_that_fails_ends_its_lease(leases, words):
    leases("micro-batch")
    model, _ = model_and_optimizer()
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 9))
    assert words == ["Sequential", "end"]


class Interrupted(nn.Module):
    """A layer in whose forward the user presses Ctrl-C."""

    def forward(self, x):
        raise KeyboardInterrupt


def test_after_an_interrupt_the_next_forward_of_any_model_waits(leases, words):
    leases("micro-batch")
    with pytest.raises(KeyboardInterrupt):
        nn.Sequential(nn.Linear(4, 4), Interrupted())(torch.ones(2, 4))
    words.clear()
    nn.Linear(4, 4)(torch.ones(2, 4))
    assert words == ["Linear", "end"]


def raise_timeout(*_):
    raise TimeoutError


@pytest.mark.parametrize("place", ["forward", "loss", "backward", "before the step"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_signal_whose_handler_raises_ends_the_lease(
    leases, background, number, place
):
    before = signal.signal(signal.SIGALRM, raise_timeout)
    made = leases("micro-batch")
    model, _ = model_and_optimizer()

    def interrupt(here):
        if here == place:
            signal.raise_signal(number)

    def micro_batch():
        model[1].register_forward_hook(lambda *_: interrupt("forward"))
        loss = model(torch.ones(2, 4)).square().mean()
        interrupt("loss")
        loss.register_hook(lambda _: interrupt("backward"))
        loss.backward()
        interrupt("before the step")

    with pytest.raises((KeyboardInterrupt, TimeoutError)):
        micro_batch()
    assert not background.has_lease
    made.close()
    signal.signal(signal.SIGALRM, before)


def test_a_signal_whose_handler_returns_keeps_the_lease(leases, background):
    made = leases("micro-batch")
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    model, _ = model_and_optimizer()
    model(torch.ones(2, 4))
    signal.raise_signal(signal.SIGALRM)
    assert background.has_lease
    signal.signal(signal.SIGALRM, before)
    made.close()


def test_a_program_sees_its_own_handlers_of_signals(leases):
    raw = signal.getsignal(signal.SIGINT)
    made = leases("micro-batch")
    assert signal.getsignal(signal.SIGINT) is raw
    assert signal.signal(signal.SIGINT, raise_timeout) is raw
    assert signal.signal(signalnum=signal.SIGINT, handler=raw) is raise_timeout
    made.close()
    assert _signal.getsignal(signal.SIGINT) is raw


def test_a_backward_that_fails_ends_its_lease(leases, background):
    leases("micro-batch")
    model, _ = model_and_optimizer()
    model[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4)).sum().backward()
    assert not background.has_lease


class InnerSteps(nn.Module):
    """A model whose forward trains another one."""

    def __init__(self):
        super().__init__()
        self.inner, self.optimizer = model_and_optimizer()
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        for _ in range(2):
            self.inner(x).sum().backward()
            self.optimizer.step()
        return self.last(self.inner(x))


def test_a_forward_that_trains_another_model_takes_leases_after_its_steps(
    leases, words
):
    leases("micro-batch")
    InnerSteps()(torch.ones(2, 4))
    rest = "InnerSteps rest"
    assert words == ["InnerSteps", "end", rest, "end", rest]


def test_another_thread_computes_without_leases_and_is_reported_once(
    leases, words, caplog
):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    before = list(words)
    for _ in range(2):
        thread = threading.Thread(target=step, args=(model, optimizer), name="worker")
        thread.start()
        thread.join()
    assert words == before
    assert caplog.text.count("thread 'worker' without leases") == 1


@pytest.mark.parametrize("takes", [True, False])
def test_an_optimizer_that_steps_without_leases_is_reported_once(leases, caplog, takes):
    leases("micro-batch")
    model, optimizer = model_and_optimizer()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        if takes:
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()  # ends the lease
        other.step()
    assert caplog.text.count("trains without leases of cpu:6") == int(not takes)


@pytest.mark.parametrize("names", ["vgg", ":a", "a:", "a: ", "a:b\n", "\x1b[31ma:b"])
def test_names_of_a_pair_that_no_table_can_show_are_refused_at_once(names):
    with pytest.raises(SpecError, match="FOREGROUND:BACKGROUND"):
        script_leases.names_of(names)
    assert script_leases.names_of("a:b:c") == ("a", "b:c")


def test_unknown_segments_are_refused(background):
    with pytest.raises(SpecError, match="micro-batch or layer"):
        ScriptLeases(background, segments="epoch")


SCRIPT = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout)  # its output is its own
from torch import nn
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(float(model.weight.sum()).hex() if "sum" in sys.argv else "trained")
"""


def run(tmp_path, *options):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("STRETTO_")},
        "STRETTO_RUNTIME_DIR": str(tmp_path / "run"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "stretto", "run", *options, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )


def test_run_leases_each_step_of_a_script(tmp_path):
    done = run(tmp_path, "--background", "exclusive:job", "--segments", "micro-batch")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
    assert "background on exclusive:job: 5 tasks" in done.stderr
    assert f"no foreground was seen in {tmp_path / 'run'}" in done.stderr


def test_the_last_line_distinguishes_a_missed_foreground_from_none(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))
    caplog.set_level(logging.INFO)
    with Background("exclusive:job", isolates=False) as made:
        ending = script_leases._Ending(ScriptLeases(made), made, None)
        Foreground("exclusive:job").close()
        ending.run()
    assert "a foreground ran, but this process asked for no lease" in caplog.text
    assert "no foreground was seen" not in caplog.text


def test_a_script_that_takes_no_lease_gets_a_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(script_leases, "_WITHOUT_S", 0.0)
    with Background("exclusive:job", isolates=False) as made:
        leases = ScriptLeases(made)
        ending = script_leases._Ending(leases, made, None)
        ending.run()
    assert "this script took no lease of exclusive:job" in caplog.text


def test_a_script_whose_processes_compute_without_a_lease_gets_a_line(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))
    used_s = iter((3.0, 5.5))
    monkeypatch.setattr(
        script_leases,
        "child_processes",
        lambda: ChildProcesses(pids=(), used_s=next(used_s)),
    )
    with Background("exclusive:job", isolates=False) as made:
        script_leases._Ending(ScriptLeases(made), made, None).run()
    assert "this script took no lease of exclusive:job" in caplog.text


WITH_TASKS = " in steps with tasks, which are 75 % of its time"


@pytest.mark.parametrize(
    ("loss", "error", "text"),
    [
        (0.0, None, "not measured, in so few steps"),
        (0.753, 4.0, "75.3 % (uncertain, from few steps)" + WITH_TASKS),
        (0.012, 0.004, "1.2 % (within 0.4 points)" + WITH_TASKS),
    ],
)
def test_the_last_line_says_how_well_the_loss_is_known(background, loss, error, text):
    found = replace(
        background.statistics,
        loss=loss,
        loss_error=error,
        steps_s=4.0,
        task_steps_s=3.0,
    )
    assert script_leases._known_loss(found) == text


def test_a_process_that_a_background_starts_takes_no_leases(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv(variable_names.BACKGROUND, "exclusive:job")
    owner = f"{os.getppid()} exclusive:job"
    monkeypatch.setenv(variable_names.BACKGROUND_OWNER, owner)
    script_leases.lease_script()
    assert "takes no leases of exclusive:job" in caplog.text
    assert not (tmp_path / "run").exists()


def test_the_measured_pair_goes_where_it_was_asked_for_wherever_the_script_is(
    background, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable_names.BACKGROUND, "exclusive:job")
    monkeypatch.setenv(variable_names.BACKGROUND_COLLOCATION, "pairs.json")
    monkeypatch.setenv(variable_names.BACKGROUND_OWNER, "")
    endings = []
    monkeypatch.setattr(
        script_leases.atexit, "register", lambda end, *_: endings.append(end)
    )
    script_leases.lease_script()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    endings[-1]()
    assert f"no pair is written to {tmp_path / 'pairs.json'}" in caplog.text


def test_run_reports_a_device_that_has_a_background(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_RUNTIME_DIR", str(tmp_path / "run"))
    with Background("exclusive:job", isolates=False):
        done = run(tmp_path, "--background", "exclusive:job")
    assert done.returncode != 0
    assert "has a background already, process" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--segments", "layer"], "--segments needs --background"),
        (["--max-loss", "0.1"], "--max-loss needs --background"),
        (["--foreground", "cpu", "--background", "cpu"], "either --foreground or"),
        (["--background", "cpu", "--segments", "epoch"], "epoch"),
        (["--background", ""], "--background needs the name of a device"),
        (["--foreground", " "], "--foreground needs the name of a device"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    script = str(Path(__file__))
    found = CliRunner().invoke(command, [*options, script])
    assert found.exit_code == 2
    assert message in found.output


def test_a_loss_that_is_no_number_is_refused(tmp_path):
    done = run(tmp_path, "--background", "cpu:6", "--max-loss", "much")
    assert done.returncode != 0
    assert "must be a number, got 'much'" in done.stderr
    assert "Traceback" not in done.stderr
