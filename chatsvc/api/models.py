"""Which models can be chosen."""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import Controller, get

from chatsvc.api.schemas import Degraded
from chatsvc.inference.base import EngineHealth
from chatsvc.limits import Principal
from chatsvc.scheduler import Scheduler


class ModelOut(msgspec.Struct, frozen=True):
    """One model. The first three members are those of OpenAI's list."""

    id: str
    object: Literal["model"]
    owned_by: str
    default: bool
    """Used where nothing else is said."""
    ready: bool | None
    """Whether it takes work in this process; None: it runs in others only."""
    window: int | None
    """Tokens of its context window, where it runs in this process and has started."""
    degraded: list[Degraded]
    """What is given up now for replies of the caller's tier by it, because there is too little."""


class ModelsOut(msgspec.Struct, frozen=True):
    """``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelOut]


class ModelController(Controller):
    """``/v1/models``."""

    path = "/v1/models"
    tags = ("models",)

    @get(operation_id="listModels", summary="List models", sync_to_thread=False)
    def list(self, principal: Principal, scheduler: Scheduler) -> ModelsOut:
        """The models that a conversation or a message may name, the default one first."""
        health = scheduler.health()
        names = sorted(scheduler.models, key=lambda name: (name != scheduler.default_model, name))
        return ModelsOut("list", [_model(name, scheduler, health.get(name), principal) for name in names])


def _model(name: str, scheduler: Scheduler, health: EngineHealth | None, principal: Principal) -> ModelOut:
    engine = scheduler.engines.get(name)
    here = health is not None and health.ready
    ready = None if engine is None else here or scheduler.replicas.others_serve(name)
    return ModelOut(
        id=name,
        object="model",
        owned_by="chatsvc",
        default=name == scheduler.default_model,
        ready=ready,
        window=engine.limits.window if engine is not None and here else None,
        degraded=list(scheduler.pressure.in_force(principal.tier, name)),
    )
