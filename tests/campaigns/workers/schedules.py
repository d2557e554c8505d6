"""Random schedules that can be pickled: any placement, any order, any rule."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from asyncpipe.core.schedules.protocol import Action, B, F, I, OrderedSchedule, RuledSchedule, Shape, W

__all__ = ["RandomOrder", "RandomRule"]


def _placement(seed: int, shape: Shape) -> list[int]:
    """A device for each stage; none is left out."""
    chance = random.Random(seed)
    places = list(range(shape.devices)) + [chance.randrange(shape.devices) for _ in range(shape.stages - shape.devices)]
    chance.shuffle(places)
    return places


@dataclass(frozen=True, kw_only=True)
class RandomRule(RuledSchedule):
    """Any placement, any priorities, any cap of at least 1 for what comes in at each device."""

    seed: int
    cap: int
    splits_backward: bool
    ahead: int
    name = "random rule"

    @classmethod
    def draw(cls, shape: Shape, seed: int) -> RandomRule:
        """The rule of this seed."""
        chance = random.Random(seed)
        splits, ahead = chance.random() < 0.5, chance.choice([1, 1, 2, 3])
        return cls(seed=seed, cap=chance.randint(1, 4), splits_backward=splits, ahead=ahead)

    def placement(self, shape: Shape) -> Sequence[int]:
        return _placement(self.seed, shape)

    def check(self, shape: Shape) -> None:
        pass

    def priority(self, action: Action, shape: Shape) -> float:
        return random.Random(f"{self.seed} {action}").random()

    def admit(self, action: Action, live: int, shape: Shape) -> bool:
        return live < self.cap


@dataclass(frozen=True)
class RandomOrder(OrderedSchedule):
    """A random run of the whole step, cut up by device."""

    seed: int
    name = "random order"

    def placement(self, shape: Shape) -> Sequence[int]:
        return _placement(self.seed, shape)

    def check(self, shape: Shape) -> None:
        pass

    def order(self, device: int, shape: Shape) -> Iterable[Action]:
        return _orders(self.seed, shape)[device]


@lru_cache(maxsize=64)
def _orders(seed: int, shape: Shape) -> list[list[Action]]:
    chance = random.Random(f"order {seed}")
    ways = []
    for i in range(shape.microbatches):
        way = [F(i, j) for j in range(shape.stages)]
        late: list[Action] = []
        for j in reversed(range(shape.stages)):
            if chance.random() < 0.5:
                way.append(I(i, j))
                (way if chance.random() < 0.5 else late).append(W(i, j))
            else:
                way.append(B(i, j))
        ways.append([*way, *late])
    placement = _placement(seed, shape)
    orders: list[list[Action]] = [[] for _ in range(shape.devices)]
    while ways:
        way = chance.choice(ways)
        action = way.pop(0)
        orders[placement[action.stage]].append(action)
        ways = [each for each in ways if each]
    return orders
