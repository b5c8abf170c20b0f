"""A first change inside an object of a script's own class is never overlooked."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.worker.state.cells import Object
from elastic.worker.state.signs import Walk
from tests.unit.worker.state.undoing import WIDE, Script, add, layer


class Shadow:
    """Keeps the tensors that it loads, without copying them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tensors = state_dict["tensors"]


@pytest.mark.parametrize("width", [2, WIDE], ids=["small", "large"])
def test_tensors_that_share_memory_still_do_when_they_are_put_back(width: int) -> None:
    tied = torch.zeros(width, width)
    shadow = Shadow({"read": tied, "write": tied.detach()})
    script = Script(shadow=shadow)
    assert script.lost(lambda: tied.add_(1))
    shadow.tensors["read"].fill_(7.0)
    assert bool((shadow.tensors["write"] == 7.0).all())


class Nested:
    """Keeps its tensor in another object."""

    def __init__(self) -> None:
        self.inner = Holder()

    def change(self) -> None:
        self.inner.tensor.add_(1)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.inner.tensor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.tensor.copy_(state_dict["tensor"])


class Holder:
    """Has no __dict__."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor = torch.zeros(WIDE, WIDE)


class SecondOfTwo(Nested):
    """Changes the second tensor of a dictionary."""

    def __init__(self) -> None:
        self.tensors = {"first": torch.zeros(2), "second": torch.zeros(WIDE, WIDE)}

    def change(self) -> None:
        self.tensors["second"].add_(1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, tensor in state_dict.items():
            self.tensors[name].copy_(tensor)


class Various(Holder):
    """Holds, beside large tensors, values that have no version counter."""

    __slots__ = ("bank", "moments", "phase", "recent", "seen", "sizes", "sums")

    def __init__(self) -> None:
        self.bank = torch.zeros(WIDE, WIDE)
        super().__init__()
        self.seen: set[int] = set()
        self.recent = deque([0.5])
        self.sums = np.zeros(3)
        self.sizes = dict.fromkeys(range(100), 0)
        self.moments = 1 + 1j
        self.phase = b"warm"

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {
            "tensor": self.tensor,
            "recent": list(self.recent),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: no test looks at what is put back."""


@pytest.mark.parametrize("name", [*Various.__slots__, "tensor"])
def test_a_first_change_of_any_kind_is_reported_as_not_undone(name: str) -> None:
    changes: dict[str, Callable[[Various], Any]] = {
        "bank": lambda o: o.bank.add_(1),
        "tensor": lambda o: o.tensor.add_(1),
        "seen": lambda o: o.seen.add(3),
        "recent": lambda o: o.recent.append(0.25),
        "sums": lambda o: o.sums.__iadd__(1),
        "sizes": lambda o: o.sizes.update({50: 1}),
        "moments": lambda o: setattr(o, "moments", 2j),
        "phase": lambda o: setattr(o, "phase", b"full"),
    }
    item = Various()
    script = Script(item=item)
    script.learn()
    assert not script.lost(lambda: changes[name](item))


class Target(Nested):
    """Keeps a module, as a target network or a hand-written average of weights does."""

    def __init__(self) -> None:
        self.module = layer()

    def change(self) -> None:
        add(self.module)()

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module.load_state_dict(state_dict)


class OneOfMany(SecondOfTwo):
    """Changes one tensor in the middle of a long dictionary, such as one prototype a class."""

    def __init__(self) -> None:
        self.tensors = {str(number): torch.zeros(WIDE, WIDE) for number in range(40)}

    def change(self) -> None:
        self.tensors["7"].add_(1)


class OneOfManyPairs(OneOfMany):
    """Changes one tensor in the middle of a long list that has a count beside each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = [(tensor, 0) for tensor in self.tensors.values()]
        self.state_dict = self.tensors.copy  # type: ignore[method-assign]
        del self.tensors

    def change(self) -> None:
        self.pairs[7][0].add_(1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for (tensor, _), saved in zip(self.pairs, state_dict.values(), strict=True):
            tensor.copy_(saved)


def test_an_object_that_refers_to_a_tracked_model_does_not_count_as_changed_with_it() -> None:
    class Average(Nested):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    net = layer()
    script = Script(average=Average(net), model=net)
    script.learn()
    script.block(add(net))
    script.undo.begin()
    assert [c.name for i, c in enumerate(script.undo._large) if i in script.undo._begin.large] == [
        "model"
    ]


def test_a_module_that_a_tracked_object_has_replaced_is_soon_freed() -> None:
    target = Target()
    script = Script(target=target)
    script.learn()
    replaced = []
    for _ in range(6):
        replaced.append(weakref.ref(target.module))
        target.module = copy.deepcopy(target.module)
        script.block()
    gc.collect()
    assert sum(module() is not None for module in replaced) <= 2


def test_a_module_in_a_tracked_object_may_have_a_sparse_buffer_and_a_lazy_parameter() -> None:
    target = Target()
    target.module.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
    target.lazy = nn.LazyLinear(2)  # type: ignore[attr-defined]
    script = Script(target=target)
    script.learn()
    assert not script.lost(target.change)


def test_a_first_change_beside_a_shared_tracked_module_is_reported_as_not_undone() -> None:
    target, shared, head = Target(), layer(), layer()
    target.module = nn.Sequential(shared, head)  # type: ignore[assignment]
    script = Script(target=target, model=shared)
    script.learn()
    assert not script.lost(add(head))


class Called(Nested):
    """Can be called, as a metric or an averaged model often can."""

    __call__ = Nested.change


class Adapter(Nested):
    """Has no state but that of the object which two functions name."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any], change: Any) -> None:
        self.get, self.put = get, put
        self.__dict__["change"] = functools.partial(change)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.get()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.put(state_dict)


class ByMethods(Adapter):
    def __init__(self) -> None:
        inner = Nested()
        super().__init__(inner.state_dict, inner.load_state_dict, inner.change)


class ByLambdas(Adapter):
    def __init__(self) -> None:
        inner = Nested()
        super().__init__(lambda: inner.state_dict(), lambda s: inner.load_state_dict(s), int)
        self.__dict__["change"] = lambda: inner.change()


GLOBAL = Nested()


class ByGlobals(Adapter):
    """A script may write it so at its top level."""

    def __init__(self) -> None:
        super().__init__(
            lambda: GLOBAL.state_dict(), lambda s: GLOBAL.load_state_dict(s), GLOBAL.change
        )


class Prototypes(OneOfMany):
    """Changes one tensor in the middle of a dictionary of hundreds that has a count beside each."""

    number = 300

    def __init__(self) -> None:
        self.classes = {i: {"tensor": torch.zeros(64), "count": 0} for i in range(self.number)}

    def change(self) -> None:
        self.classes[7]["tensor"].add_(1)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return {"classes": self.classes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.classes = state_dict["classes"]


class Deep(Prototypes):
    """Changes a tensor several containers below."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = {0: {"layers": [{"attention": {"keys": self.classes}}]}}  # type: ignore[dict-item]

    def change(self) -> None:
        self.classes[0]["layers"][0]["attention"]["keys"][7]["tensor"].add_(1)  # type: ignore[index]


class Counted(Nested):
    """Changes a number of numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = np.int64(0)

    def change(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": int(self.count), "tensor": self.inner.tensor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = np.int64(state_dict["count"])


class Drawing(Nested):
    """Draws from a generator whose state lies in C."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def change(self) -> None:
        self.generator.random()

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.generator.bit_generator.state, "tensor": self.inner.tensor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state_dict["random"]


@pytest.mark.parametrize(
    "kind",
    [
        *(Nested, SecondOfTwo, Target, OneOfMany, OneOfManyPairs),
        *(Called, ByMethods, ByLambdas, ByGlobals, Prototypes, Deep, Counted, Drawing),
    ],
)
def test_a_first_change_deep_inside_an_object_is_reported_as_not_undone(kind: type[Nested]) -> None:
    item = kind()
    script = Script(item=item)
    script.learn()
    assert not script.lost(item.change)


class TooMany(Prototypes):
    """More objects than are looked at in every block."""

    number = 3000


class Cloning(Drawing):
    """Clones what it gives away, so that two states never look the same."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "tensor": self.inner.tensor.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.tensor.copy_(state_dict["tensor"])


@pytest.mark.parametrize("kind", [pytest.param(TooMany, marks=pytest.mark.long), Cloning])
def test_an_object_whose_changes_cannot_be_seen_is_copied_in_every_block(
    kind: type[Nested],
) -> None:
    item = kind()
    script = Script(item=item)
    script.learn()
    for _ in range(3):
        assert script.lost(item.change)
        script.block(item.change)


class Bank(Nested):
    """Has a large tensor and a list of tensors that is made anew now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.features = [torch.zeros(WIDE, WIDE)]

    def rebuild(self, value: float) -> None:
        self.features.clear()  # the next one may get the id and the memory of the old one
        self.features.append(torch.full((WIDE, WIDE), value))

    def state_dict(self) -> dict[str, Any]:
        return {"features": self.features}


def test_a_tensor_in_the_place_of_a_freed_one_counts_as_a_change() -> None:
    bank = Bank()
    cell = Object("bank", bank)
    for turn in range(100):
        sign = cell.sign()
        assert cell.sign() == sign
        bank.rebuild(float(turn))
        assert cell.sign() != sign, turn


class PrivateSlots:
    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = [0]

    def change(self) -> None:
        self.__count[0] += 1


class Evaluator:
    def __init__(self) -> None:
        self.net = nn.Sequential(layer(2), Predictions())

    def change(self) -> None:
        self.net[1].collected.append(1.0)


class Predictions(nn.Module):
    """A metric whose state_dict() has nothing of its own until it has collected something."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[float] = []

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.collected:
            destination[f"{prefix}collected"] = torch.tensor(self.collected)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.collected = state_dict.pop(f"{prefix}collected", torch.zeros(0)).tolist()
        super()._load_from_state_dict(state_dict, prefix, *rest)


class InASet:
    def __init__(self) -> None:
        self.those = {Holder()}

    def change(self) -> None:
        next(iter(self.those)).tensor.add_(1)


class AsKeys(InASet):
    def __init__(self) -> None:
        self.those = dict.fromkeys([Holder()], 1.0)  # type: ignore[assignment]


class OfAFunction:
    def __init__(self) -> None:
        def call(*, counts: list[int] = [0]) -> None:  # noqa: B006
            counts[0] += 1

        self.call = call

    def change(self) -> None:
        self.call()


class OnAFunction(OfAFunction):
    def change(self) -> None:
        vars(self.call)["calls"] = vars(self.call).get("calls", 0) + 1


class Arrays:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def change(self) -> None:
        self.array[0] = self.array[1]


class ObjectsInAnArray(Arrays):
    def __init__(self) -> None:
        super().__init__(np.array([[1], 2], dtype=object))

    def change(self) -> None:
        self.array[0].append(1)


class Masked(Arrays):
    def __init__(self) -> None:
        super().__init__(np.ma.masked_array([1.0, 1.0], [False, False]))

    def change(self) -> None:
        self.array[0] = np.ma.masked


HIDING: list[Callable[[], Any]] = [
    *(PrivateSlots, Evaluator, InASet, AsKeys, OfAFunction, OnAFunction, ObjectsInAnArray, Masked),
    *(functools.partial(Arrays, np.array([1, 2], dtype=f"datetime64[{unit}]")) for unit in "Ds"),
    functools.partial(Arrays, np.array([1, 2], dtype="timedelta64[s]")),
]


@pytest.mark.parametrize("make", HIDING, ids=str)
def test_signs_reach_what_an_object_refers_to(make: Callable[[], Any]) -> None:
    found = make()
    before = Walk()
    sign = before.sign(found)
    same, after = Walk(known=before), Walk(known=before)
    assert same.sign(found) == sign
    found.change()
    assert after.sign(found) != sign
    assert before.complete
    assert after.complete


def test_what_a_metric_collects_first_in_a_lost_block_is_removed() -> None:
    net = nn.Sequential(layer(2), nn.Sequential(layer(2), Predictions()))
    metric = net[1][1]
    script = Script(net=net)
    assert script.lost(lambda: metric.collected.append(1.0))
    assert metric.collected == []
    script.block(lambda: metric.collected.append(1.0))
    assert script.lost(lambda: metric.collected.append(2.0))
    assert metric.collected == [1.0]
