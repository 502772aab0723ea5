"""`Trainer`: a training run on all ranks, from samples to weights, metrics and a report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import ceil, inf, isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint import Checkpoints
from shardwise.comm import Communicator
from shardwise.data import Batch, Loader, Source
from shardwise.data.opening import check_alike, open_pair
from shardwise.errors import ShardwiseError
from shardwise.kernels.tuner import tuning
from shardwise.launch.launchers import choose_world, run_on_workers, under_launcher
from shardwise.model.capture import ModelGraphs
from shardwise.planner.planned import examine
from shardwise.plans.plan import Plan
from shardwise.report import write_report
from shardwise.runtime.agreement import together
from shardwise.runtime.parallel import ParallelModel, of, parallelize
from shardwise.specs.plan_spec import PlanSpec

from .losses import Losses
from .out_of_memory import explained
from .progress import ProgressBars, Speed
from .recipe import make_optimizer, rate_at, set_rate
from .run_folder import CHECKPOINTS, Epoch, RunFolder, choose_folder, memory_held, resumes
from .setting_up import DTYPES, build_model, check_bf16, choose_plan, make_augment, make_costs
from .settings import Settings
from .stopping import StopSignal

TRACED = 2  # the step of an epoch that is written down: the first one still gets ready


def train(settings: Settings) -> list[Epoch]:
    """Trains and returns what each epoch came to; under a launcher, on rank 0 only.

    >>> history = train(Settings(workers=2, epochs=3))
    """
    meant = PlanSpec.parse(settings.plan, settings.split)
    world = choose_world(settings.workers, meant.num_workers)
    meant.check_workers(world)
    return run_on_workers(_fit, world, settings, timeout=settings.timeout) or []


def _fit(settings: Settings) -> list[Epoch]:
    return Trainer(settings, device=_device()).fit()


def _device() -> torch.device:
    """A launcher's workers have a GPU each, or none; local ones share those of this machine."""
    launched = under_launcher()
    if not torch.cuda.is_available() or (launched and dist.get_backend() != "nccl"):
        return torch.device("cpu")
    rank = dist.get_rank() if dist.is_initialized() else 0
    number = torch.cuda.current_device() if launched else rank % torch.cuda.device_count()
    return torch.device("cuda", number)


class Trainer:
    """Trains as settings say, on every rank of the process group; alone where there is none.

    A model, and samples, may be given instead of being named in the settings.

    >>> history = Trainer(Settings(model="digits", epochs=3)).fit()
    """

    def __init__(
        self,
        settings: Settings,
        *,
        model: nn.Module | None = None,
        train: Source | None = None,
        test: Source | None = None,
        device: torch.device | str = "cpu",
        quiet: bool = False,
    ) -> None:
        self.settings, self.device, self.comm = settings, torch.device(device), Communicator()
        self.comm.prepare(())  # so that from here on one rank's failure ends all
        with together(self.comm, "the start of training"), explained(self):
            self._set_up(model, train, test, quiet)

    def _set_up(
        self, model: nn.Module | None, train: Source | None, test: Source | None, quiet: bool
    ) -> None:
        settings = self.settings
        first = self.comm.rank == 0
        if settings.precision == "bf16" and first:
            check_bf16(self.device)
        self.given = {"model": model is not None, "data": train is not None}  # and not named
        self.name = settings.model if model is None else type(model).__name__
        if train is None:
            options = {n: getattr(settings, n) for n in ("size", "num_classes", "on_error")}
            train, test = open_pair(settings.data, settings.test_data, **options)
        self.folder = RunFolder(choose_folder(settings, self.comm), first)
        self.model = self._parallel(model or build_model(settings, train), train)
        self.optimizer = make_optimizer(settings, self.model)
        self.losses = Losses(settings, self.model, self.graph)
        self.loader, self.tests = self._loaders(train, test)
        self.step, self.saved, self.stopped = 0, -1, False
        self.total, self.count = 0.0, 0  # the losses of this epoch's samples so far
        self.history: list[Epoch] = []
        self.view = ProgressBars(first, ceil(self._num_epochs()), quiet)
        place = self.folder.path / CHECKPOINTS
        self.checkpoints = Checkpoints(place, settings.keep, comm=self.comm)
        written = self._go_on()
        self.folder.begin(self._config(), self.plan.to_json(), self.step, written)

    def _config(self) -> dict[str, Any]:
        """The settings as the run's folder gets them; what was given instead is not named there."""
        unnamed = {name: None for name, given in self.given.items() if given}
        return self.settings.model_dump(mode="json") | unnamed

    def _parallel(self, model: nn.Module, source: Source) -> ParallelModel:
        """The model on all ranks, under the plan that was asked for."""
        settings = self.settings
        shape = make_augment(settings, source).out_shape(source.shape)
        model = model.to(self.device)
        graphs = ModelGraphs(model, ((settings.batch, *shape),))
        self.graph = graphs(True, settings.batch)
        resumed = self.folder.path if resumes(settings) else None
        self.plan = choose_plan(settings, self.graph, self.comm, resumed)
        return parallelize(
            model,
            self.plan,
            output=settings.output,
            comm=self.comm,
            graphs=graphs,
            gradients=settings.gradients,
            cluster=settings.cluster,
            precision="bf16" if settings.precision == "bf16" else None,
            compile=settings.compile,
        )

    def _loaders(self, train: Source, test: Source | None) -> tuple[Loader, Loader | None]:
        """This rank's parts of the samples for training, and of those for testing."""
        settings, augment = self.settings, make_augment(self.settings, train)
        common: dict[str, Any] = {
            "batch": settings.batch,
            "box": of(self.model).input_box,
            "label_box": self.losses.label_box(train),
            "prefetch": settings.prefetch,
            "device": self.device,
        }
        mixed = {"mixup": settings.mixup, "seed": settings.seed}
        loader = Loader(train, augment=augment, **mixed, **common)
        if test is None:
            return loader, None
        check_alike(train, test)
        return loader, Loader(test, augment=augment.for_evaluation(), shuffle=False, **common)

    # -- the run -------------------------------------------------------------------------------

    def fit(self) -> list[Epoch]:
        """Trains to the end, or until a signal; returns what each epoch came to."""
        with together(self.comm, "training"):
            self._fit()
        return self.history

    def _fit(self) -> None:
        self.view.say(self._headline())
        kernels = tuning() if self.settings.kernels == "tuned" else nullcontext()
        with StopSignal(self.comm, self.device) as stop, self.view, kernels, explained(self):
            while not self.stopped and self._epochs_left() > 0:
                self._run_epoch(stop)
            self._save()
            self.checkpoints.wait()
        self.folder.close()
        if self.stopped:
            self.view.say(f"stopped after step {self.step}; --resume goes on from there")
        elif self.settings.report and self.comm.rank == 0:
            self.view.say(f"report: {write_report(self.folder.path, plan=self._examined())}")

    def _examined(self) -> Plan:
        """The plan with its costs; those of a model that was given are known here only."""
        if self.plan.findings is not None:
            return self.plan
        costs = make_costs(self.settings, self.graph, self.comm.size)
        return examine(costs, self.settings.gradients, chosen=self.plan)

    def _run_epoch(self, stop: StopSignal) -> None:
        settings, loader = self.settings, self.loader
        done = -(-loader.batches.position // settings.batch)
        number, speed, recent = loader.epoch + 1, Speed(), Speed()
        self.view.epoch(number, done + len(loader), done)
        self.model.train()
        for index, batch in enumerate(loader, start=done + 1):
            loss = self._step(batch, traced=index == TRACED)
            speed.add(batch.size)
            recent.add(batch.size)
            if self.step % settings.log_every == 0 or self.step == 1:
                lr = float(self.optimizer.param_groups[0]["lr"])
                self.folder.add_step(self.step, loss, lr, recent.take())
            self.view.step(loss, speed.rate())
            if settings.checkpoint_every and self.step % settings.checkpoint_every == 0:
                self._save()
            if stop.asked():
                self.stopped = True
                return
            if self._steps_left() <= 0:
                break
        self._end_epoch(number, speed.rate())

    def _step(self, batch: Batch, traced: bool = False) -> float:
        """One step of training; returns the loss of the whole batch."""
        settings = self.settings
        set_rate(self.optimizer, rate_at(settings, self._epochs_done(batch), self._num_epochs()))
        with self._tracing() if traced else nullcontext():
            self.optimizer.zero_grad()
            x = batch.x.to(DTYPES[settings.precision])
            loss, value = self.losses(of(self.model).forward(x, batch=batch.size), batch)
            if settings.check_finite and not isfinite(value):
                self._complain(x, batch, value)
            loss.backward()
            if settings.clip is not None:
                of(self.model).clip_grad_norm_(settings.clip)
            self.optimizer.step()
        self.step += 1
        self.total, self.count = self.total + value * batch.size, self.count + batch.size
        return value

    def _end_epoch(self, number: int, rate: float) -> None:
        """Tests, and writes down what the epoch came to."""
        if self.count == 0:  # a run that goes on where an epoch had just ended
            return
        due = self._epochs_left() <= 0 or number % self.settings.test_every == 0
        tested = (self.test() if due else None) or (None, None)
        epoch = Epoch(number, self.total / self.count, *tested, rate)
        if self.loader.batches.position in (0, self.loader.batches.end):  # else a run ends within
            self.total, self.count = 0.0, 0
        self.history.append(epoch)
        memory = self.comm.gather_objects(memory_held(self.device))
        self.folder.add_epoch(self.step, epoch, memory)
        self.view.epoch_done(number, str(epoch), epoch.accuracy)
        if self.settings.checkpoint_every is None:
            self._save()

    def test(self) -> tuple[float, float] | None:
        """Mean loss and accuracy on the test samples."""
        if self.tests is None:
            return None
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for batch in self.tests:
                x = batch.x.to(DTYPES[self.settings.precision])
                sums += self.losses.score(of(self.model).forward(x, batch=batch.size), batch)
        loss, right, count = self.losses.over_ranks(sums).tolist()
        self.model.train()
        return loss / max(count, 1), right / max(count, 1)

    # -- where the run stands ------------------------------------------------------------------

    def _num_epochs(self) -> float:
        """How long the run is, in epochs."""
        settings = self.settings
        if settings.steps is None:
            return settings.epochs
        return settings.steps * settings.batch / len(self.loader.source)

    def _epochs_done(self, batch: Batch) -> float:
        """Before this batch, which has just been given out."""
        batches = self.loader.batches
        return batches.epoch + (batches.position - batch.size) / batches.num_samples

    def _steps_left(self) -> float:
        return inf if self.settings.steps is None else self.settings.steps - self.step

    def _epochs_left(self) -> float:
        by_steps = self.settings.steps is not None
        return self._steps_left() if by_steps else self.settings.epochs - self.loader.epoch

    def _save(self) -> None:
        """A checkpoint of this step, unless there is one."""
        if self.saved == self.step:
            return
        self.saved = self.step
        progress = {
            "step": self.step,
            "data": self.loader.state_dict(),
            "losses": [self.total, self.count],
            "metrics_bytes": self.comm.gather_objects(self.folder.num_bytes)[0],
        }
        self.checkpoints.save(self.step, self.model, self.optimizer, progress)

    def _go_on(self) -> int | None:
        """Loads the last checkpoint of a run that goes on; returns how long its metrics were."""
        if not resumes(self.settings) or self.checkpoints.latest() is None:
            torch.manual_seed(self.settings.seed)  # what ranks drop out must agree
            return None
        progress = self.checkpoints.load(self.model, self.optimizer)
        self.loader.load_state_dict(progress["data"])
        self.step = self.saved = progress["step"]
        self.total, self.count = progress["losses"]
        self.view.say(f"going on from step {self.step} of {self.folder.path}")
        return progress["metrics_bytes"]

    # -- what is said --------------------------------------------------------------------------

    def _headline(self) -> str:
        settings, workers = self.settings, f"{self.comm.size} worker{'s'[: self.comm.size - 1]}"
        split = settings.split or (
            "an automatic plan" if settings.plan == "auto" else settings.plan
        )
        place = self.folder.path
        return f"{self.name} on {workers}, {split}, batches of {settings.batch}, in {place}"

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        with of(self.model).record() as trace:
            yield
        self.folder.add_trace(self.step + 1, trace)
        self.view.exposed(float(trace.exposed.mean()), trace.seconds)

    def _complain(self, x: torch.Tensor, batch: Batch, value: float) -> None:
        """Stops at a loss that is not finite."""
        layer = of(self.model).first_not_finite(x, batch=batch.size)
        where = "in the loss itself" if layer is None else f"first in the output of layer {layer!r}"
        raise ShardwiseError(
            f"the loss is {value} at step {self.step + 1} (epoch {self.loader.epoch + 1}), "
            f"{where}; lower lr, clip gradients or set check_finite to false"
        )
