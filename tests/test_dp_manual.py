"""``strategy="bucketdp"`` with manual optimisation: replicas meet wherever something is changed that they share."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_bucketddp.replicas.apply import parallel_apply
from lightning_bucketddp.trainer.dp.lockstep import AbandonedError, Lockstep
from tests.dp import fit, replicas, samples
from tests.lightning_models import Digits, Gan, Memory, close_to

CPU = torch.device("cpu")


@replicas
@pytest.mark.parametrize("closures", [False, True], ids=["plain", "closures"])
def test_a_gan_is_trained_as_on_one_device(share: bool, closures: bool) -> None:
    def trained(devices: int) -> tuple[Gan, Any]:
        model = Gan(closures)
        options = {"logger": Memory(), "log_every_n_steps": 1, "precision": "64-true"}
        return model, fit(model, devices, share, samples((8,), (4,)), **options)

    (expected, reference), (found, trainer) = trained(1), trained(3)
    close_to(found, expected)
    assert trainer.global_step == reference.global_step == 16
    torch.testing.assert_close(trainer.logger.logged, reference.logger.logged)
    torch.testing.assert_close(trainer.callback_metrics, reference.callback_metrics)
    logged = trainer.callback_metrics.keys()
    assert any(name.startswith("grad_2.0_norm") for name in logged), "hooks in the middle of a step log too"
    assert logged >= ({"rate of LightningLBFGS"} if closures else {"critic", "generator_epoch"})


class Manual(Gan):
    """What a test's step does, which gets the module, both optimizers, the samples and which batch it is."""

    step: Callable[..., Any]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        second = bool(self.second_share is not None and any(torch.equal(batch[0][0], row) for row in self.second_share))
        return type(self).step(self, *self.optimizers(), batch[0], second)

    def __init__(self, second_share: Tensor | None = None) -> None:
        super().__init__()
        self.second_share = second_share


def run(step: Callable[..., Any], devices: int = 2, share: bool = True, **options: Any) -> Manual:
    loader = samples((8,))
    second_share = torch.cat([batch[3:] for (batch,) in loader])
    model = type("Tested", (Manual,), {"step": step})(second_share if devices > 1 else None)
    fit(model, devices, share, loader, **options)
    return model


def critic_loss(module: Manual, batch: Tensor) -> Tensor:
    return module.critic(batch).square().mean()


def calls_another(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
    loss = critic_loss(module, batch)
    if in_second:
        second.zero_grad()
    module.manual_backward(loss)


def steps_another(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
    module.manual_backward(critic_loss(module, batch))
    (second if in_second else first).step()


def ends_earlier(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
    if not in_second:
        module.manual_backward(critic_loss(module, batch))


def ends_later(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
    if in_second:
        module.manual_backward(critic_loss(module, batch))


def steps_without_closure(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
    second.step(closure=None if in_second else lambda: module.manual_backward(critic_loss(module, batch)))


@pytest.mark.parametrize(
    ("step", "calls"),
    [
        (calls_another, ["replica 0 (cpu) called manual_backward()", "replica 1 (cpu) called optimizer 1.zero_grad()"]),
        (steps_another, ["replica 0 (cpu) called optimizer 0.step()", "replica 1 (cpu) called optimizer 1.step()"]),
        (ends_earlier, ["replica 0 (cpu) called manual_backward()", "replica 1 (cpu) ended"]),
        (ends_later, ["replica 1 (cpu) called manual_backward()", "replica 0 (cpu) ended"]),
        (steps_without_closure, ["optimizer 1.step(closure)", "replica 1 (cpu) called optimizer 1.step()"]),
    ],
)
def test_replicas_that_make_different_calls_raise_an_error_that_names_both(
    step: Callable[..., Any], calls: list[str]
) -> None:
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="expected the replicas to make the same calls") as caught:
        run(step)
    for call in calls:
        assert call in str(caught.value)
    assert threading.active_count() == before


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_in_one_replica_is_raised_while_the_others_wait(failing: int) -> None:
    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        if in_second == bool(failing):
            raise LookupError("of this replica")
        module.manual_backward(critic_loss(module, batch))

    before = threading.active_count()
    with pytest.raises(LookupError, match="of this replica"):
        run(step)
    assert threading.active_count() == before


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_within_a_toggled_optimizer_is_raised_and_leaves_nothing_frozen(failing: int) -> None:
    modules = []

    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        with module.toggled_optimizer(first):
            assert not all(param.requires_grad for param in module.critic.parameters())
            if not in_second:
                modules.append(module)
            if in_second == bool(failing):
                raise LookupError("of this replica")
            module.manual_backward(module.critic(module.generator(batch[:, :4])).square().mean())

    with pytest.raises(LookupError, match="of this replica") as caught:
        run(step)
    assert caught.value.__context__ is None
    assert all(param.requires_grad for param in modules[0].parameters())


def test_a_toggled_optimizer_trains_as_on_one_device() -> None:
    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        with module.toggled_optimizer(second):
            assert not any(param.requires_grad for param in module.generator.parameters())
            second.zero_grad()
            module.manual_backward(critic_loss(module, batch))
            second.step()
        assert all(param.requires_grad for param in module.generator.parameters())

    close_to(run(step), run(step, devices=1))


@pytest.mark.parametrize("devices", [1, 2])
def test_replicas_stay_together_when_a_step_catches_what_one_call_for_all_raised(devices: int) -> None:
    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        first.zero_grad()
        with pytest.raises(RuntimeError, match="does not require grad"):
            module.manual_backward(critic_loss(module, batch).detach())
        caught.append(1)
        module.manual_backward(critic_loss(module, batch))
        second.step()

    caught: list[int] = []
    run(step, devices)
    assert len(caught) == 8 * devices


def test_an_exception_where_one_replica_acts_for_all_is_raised() -> None:
    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        module.clip_gradients(first, gradient_clip_val=1.0, gradient_clip_algorithm="unheard of")

    with pytest.raises(Exception, match="unheard of"):
        run(step)


@replicas
def test_a_backward_of_a_replicas_own_is_an_error(share: bool) -> None:
    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        critic_loss(module, batch).backward()

    with pytest.raises(RuntimeError, match=r"expected backward by self\.manual_backward"):
        run(step, share=share)
    model = run(step, devices=1)  # which has no replicas
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_optimizers_kept_from_an_earlier_step_are_refused() -> None:
    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        module.kept = getattr(module, "kept", None) or first
        module.kept.zero_grad()

    with pytest.raises(RuntimeError, match=r"found optimizer 0\.zero_grad\(\) of one that has ended; call self\.opt"):
        run(step)
    run(step, devices=1)


@replicas
def test_what_a_step_sets_and_what_it_recorded_stays_when_optimizers_step(share: bool) -> None:
    """One graph of the generator serves two backwards, with a step of the critic between them."""

    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        module.made = module.generator(batch[:, :4])
        module.toggle_optimizer(second)
        second.zero_grad()
        module.manual_backward((module.critic(module.made.detach()) - module.critic(batch)).square().mean())
        second.step()
        module.untoggle_optimizer(second)
        first.zero_grad()
        module.manual_backward(module.critic(module.made).square().mean())
        first.step()

    close_to(run(step, share=share), run(step, devices=1))


@replicas
@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
def test_what_follows_an_optimizers_step_sees_the_stepped_parameters(share: bool, closure: bool) -> None:
    losses: dict[int, list[Tensor]] = {1: [], 2: []}

    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        def backward() -> Tensor:
            second.zero_grad()
            loss = critic_loss(module, batch)
            module.manual_backward(loss)
            return loss

        if closure:
            module.losses.append(second.step(backward).detach())
        else:
            backward()
            with torch.no_grad():
                second.step()
        module.losses.append(backward().detach())
        second.step()

    def trained(devices: int) -> Manual:
        model = type("Tested", (Manual,), {"step": step})()
        model.losses = losses[devices]
        fit(model, devices, share, samples((8,)))
        return model

    close_to(trained(2), trained(1))
    torch.testing.assert_close(losses[2], losses[1])
    assert len(losses[1]) == 8 * (1 + closure)


class Scaling(torch.optim.SGD):
    """Scales its parameters before it asks for the loss."""

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.mul_(scale)
        return super().step(closure)


@replicas
def test_an_optimizers_own_arguments_reach_it_when_all_replicas_have_got_there(share: bool) -> None:
    class Scaled(Manual):
        def configure_optimizers(self) -> Any:
            self.losses: list[Tensor] = []
            return [Scaling(net.parameters(), lr=0.1) for net in (self.generator, self.critic)]

    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        def backward() -> None:  # returns no loss
            second.zero_grad()
            module.manual_backward(critic_loss(module, batch))

        assert module.lr_schedulers() is None
        module.losses.append(critic_loss(module, batch).detach())
        second.step(backward, scale=0.5)
        module.losses.append(critic_loss(module, batch).detach())
        second.step(scale=0.9)

    def trained(devices: int) -> Any:
        model = type("Tested", (Scaled,), {"step": step})()
        fit(model, devices, share, samples((8,)))
        return model

    found, expected = trained(2), trained(1)
    close_to(found, expected)
    torch.testing.assert_close(found.losses, expected.losses)


def test_arguments_of_manual_backward_are_passed_on_but_no_gradient_is_taken() -> None:
    def twice(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        loss = critic_loss(module, batch)
        second.zero_grad()
        module.manual_backward(loss, retain_graph=True)
        module.manual_backward(loss)
        second.step()

    close_to(run(twice), run(twice, devices=1))
    for args, kwargs in (((torch.tensor(2.0),), {}), ((), {"gradient": torch.tensor(2.0)})):

        def weighted(
            module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool, args: Any = args, kw: Any = kwargs
        ) -> None:
            module.manual_backward(critic_loss(module, batch), *args, **kw)

        with pytest.raises(ValueError, match=r"without a gradient, .* multiply the loss with it"):
            run(weighted)


def test_optimizers_as_torch_has_them_are_stepped_once_for_all_replicas() -> None:
    counts = []

    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        _, plain = module.optimizers(use_pl_optimizer=False)
        plain.zero_grad()
        module.manual_backward(critic_loss(module, batch))
        plain.step()
        counts.append(module.trainer.global_step)

    close_to(run(step), run(step, devices=1))
    assert set(counts) == {0}, "Lightning counts steps of its own optimizers only"


def test_outputs_of_manual_optimisation_may_be_of_each_sample() -> None:
    class Returning(Manual):
        seen: list[Any]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(outputs)

    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> Any:
        return {"loss": module.critic(batch)[:, 0]}

    def outputs(devices: int) -> list[Any]:
        model = type("Tested", (Returning,), {"step": step, "seen": []})()
        fit(model, devices, loader=samples((8,)), max_epochs=1)
        return model.seen

    torch.testing.assert_close(outputs(2), outputs(1))


@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
def test_schedulers_get_the_mean_of_what_replicas_give_them(by_name: bool) -> None:
    class Plateau(Manual):
        def configure_optimizers(self) -> Any:
            optimizers, _ = super().configure_optimizers()
            return optimizers, [
                torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[1], factor=0.5, patience=1, threshold=0.02)
            ]

    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        loss = critic_loss(module, batch)
        second.zero_grad()
        module.manual_backward(loss)
        second.step()
        scheduler = module.lr_schedulers()
        assert isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        scheduler.step(metrics=loss.detach()) if by_name else scheduler.step(loss.detach())
        module.log("rate", second.param_groups[0]["lr"])
        module.log("bad", float(scheduler.num_bad_epochs))

    def logged(devices: int) -> Any:
        model = type("Tested", (Plateau,), {"step": step})()
        return fit(model, devices, True, samples((8,)), logger=Memory(), log_every_n_steps=1).logger.logged

    found, expected = logged(2), logged(1)
    torch.testing.assert_close(found, expected)
    assert len({metrics["rate"] for _, metrics in found if "rate" in metrics}) > 1


def test_a_schedulers_epoch_is_that_of_every_replica() -> None:
    class Restarted(Manual):
        def configure_optimizers(self) -> Any:
            optimizers, _ = super().configure_optimizers()
            return optimizers, [torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizers[1], T_0=10)]

    def step(module: Manual, first: Any, second: Any, batch: Tensor, in_second: bool) -> None:
        module.lr_schedulers().step(3)

    def rate(devices: int) -> float:
        model = type("Tested", (Restarted,), {"step": step})()
        return fit(model, devices, loader=samples((8,))).optimizers[1].param_groups[0]["lr"]

    assert rate(2) == rate(1) < 1e-2


def test_schedulers_step_once_for_all_replicas_in_automatic_optimisation_too() -> None:
    class Stepped(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.lr_schedulers().step()
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1000}]

    (expected,), (found,) = (fit(Stepped(), devices, max_epochs=1).optimizers for devices in (1, 2))
    assert found.param_groups[0]["lr"] == expected.param_groups[0]["lr"] == 0.1 * 0.5**4


# -- the meeting itself ------------------------------------------------------------------------------


def in_threads(count: int, replica: Callable[[int, Lockstep], Any]) -> list[Any]:
    lockstep = Lockstep([CPU] * count, "training_step")

    def run_one(index: int) -> Any:
        try:
            result = replica(index, lockstep)
        except BaseException as error:
            lockstep.end(index, error)
            raise
        lockstep.end(index)
        return result

    modules: list[Any] = [run_one] * count
    return parallel_apply(modules, [(index,) for index in range(count)])


def test_the_first_replica_acts_with_what_all_brought() -> None:
    acted: list[Any] = []

    def replica(index: int, lockstep: Lockstep) -> list[int]:
        results = []
        for turn in range(50):
            once = lambda values: acted.append((threading.current_thread(), values)) or sum(values)  # noqa: E731
            results.append(lockstep.meet(index, "add()", index + turn, once))
        return results

    expected = [3 + 3 * turn for turn in range(50)]
    assert in_threads(3, replica) == [expected] * 3
    assert [values for _, values in acted] == [[turn, turn + 1, turn + 2] for turn in range(50)]
    assert {thread for thread, _ in acted} == {threading.current_thread()}


def test_what_the_first_replica_raised_for_all_is_raised_in_all_and_they_go_on() -> None:
    class Odd(LookupError):
        def __init__(self, first: str, second: str) -> None:  # which cannot be copied
            super().__init__(first + second)

    class Changing(LookupError):
        def __reduce__(self) -> Any:  # whose copies are of another class
            return LookupError, self.args

    caught: list[BaseException] = []

    def replica(index: int, lockstep: Lockstep) -> int:
        for error in (LookupError("of all"), Odd("of ", "all"), Changing("of all")):

            def once(_: list[Any], error: Exception = error) -> None:
                raise error

            with pytest.raises(type(error), match="of all") as found:
                lockstep.meet(index, "fail()", None, once)
            assert type(found.value) is type(error)
            caught.append(found.value)
        return lockstep.meet(index, "add()", index, sum)

    assert in_threads(3, replica) == [3] * 3
    assert len({id(error) for error in caught if type(error) is LookupError}) == 3, "each with its own traceback"


def test_an_earlier_failure_is_what_later_calls_raise() -> None:
    def replica(index: int, lockstep: Lockstep) -> None:
        if index == 1:
            raise LookupError
        for _ in range(2):
            with pytest.raises(AbandonedError):
                lockstep.meet(index, "wait()", None, lambda _: None)

    with pytest.raises(LookupError):
        in_threads(2, replica)


def test_results_are_kept_no_longer_than_all_have_read_them() -> None:
    class Result:
        pass

    results: list[weakref.ref[Result]] = []

    def once(_: list[Any]) -> Result:
        result = Result()
        results.append(weakref.ref(result))
        return result

    lockstep = Lockstep([CPU] * 3, "training_step")
    gc.collect()
    gc.disable()
    try:
        found = parallel_apply(
            [lambda index: lockstep.meet(index, "make()", None, once)] * 3,
            [(0,), (1,), (2,)],  # type: ignore[list-item]
        )
        assert [result is found[0] for result in found] == [True] * 3
        del found
        assert results[0]() is None
    finally:
        gc.enable()


def test_errors_are_kept_no_longer_than_all_have_caught_them() -> None:
    class Failure(Exception):
        pass

    errors: list[weakref.ref[Failure]] = []

    def failure() -> Failure:
        error = Failure()
        errors.append(weakref.ref(error))
        return error

    def once(_: list[Any]) -> None:
        raise failure()

    def replica(index: int, lockstep: Lockstep) -> bool:
        try:
            lockstep.meet(index, "fail()", None, once)
        except Failure:
            return True
        return False

    gc.collect()
    gc.disable()
    try:
        assert in_threads(3, replica) == [True] * 3
        assert errors[0]() is None
    finally:
        gc.enable()


def test_two_threads_of_one_replica_cannot_meet() -> None:
    def replica(index: int, lockstep: Lockstep) -> None:
        lockstep.meet(0, f"call {index}", None, lambda _: None)

    with pytest.raises(RuntimeError, match=r"replica 0 \(cpu\) to make one call at a time"):
        in_threads(2, replica)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_nobody_waits_for_a_replica_that_raised(failing: int) -> None:
    ends: dict[int, type] = {}

    def replica(index: int, lockstep: Lockstep) -> None:
        try:
            for turn in range(3):
                if turn == 2 and index == failing:
                    raise LookupError
                lockstep.meet(index, "wait()", None, lambda _: None)
        except RuntimeError as error:
            ends[index] = type(error)

    with pytest.raises(LookupError):
        in_threads(3, replica)
    assert ends == {index: AbandonedError for index in range(3) if index != failing}
