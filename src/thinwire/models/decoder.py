"""What our language models share: any run of consecutive layers, with or without the ends, is a model too.

Dimension letters: B microbatch, T tokens, D width, V vocabulary.

Parameter names carry the global layer index (`layers.3.attention.wqkv.weight`), so they do not depend on how
the model is cut into stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from thinwire.models.configs import require

TIED_NAMES = ("embedding.weight", "head.weight")


class Decoder(nn.Module):
    """Base of models made of an embedding, numbered layers, a norm and a head; makes and checks slices of them.

    A slice without the embedding takes hidden states, one without the head returns them; the parts of an end
    that it lacks are then None. Building allocates the chosen parts only, on the default or the meta device;
    call `init_weights` before use (the constructor leaves torch's default values).

    `config` has `vocab_size`, `dim`, `num_layers`, `max_seq_len` and `tied_head`.
    """

    FIRST_PARTS: ClassVar[tuple[str, ...]] = ("embedding",)
    LAST_PARTS: ClassVar[tuple[str, ...]] = ("norm", "head")

    config: Any
    embedding: nn.Embedding | None
    layers: nn.ModuleDict
    head: nn.Linear | None

    def __init__(self, config: Any, *, layers: range | None = None, embedding: bool = True, head: bool = True) -> None:
        super().__init__()
        if layers is not None:
            _check_slice(config.num_layers, layers, embedding or head)
        self.config = config

    def _tie(self) -> None:
        if self.config.tied_head and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keeps a tied head tied through `to`, `to_empty` and the like, which may replace parameters."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self

    def _check_input(self, x: Tensor) -> None:
        dim, longest = self.config.dim, self.config.max_seq_len
        given = f"model input of shape {tuple(x.shape)}, {x.dtype}"
        if self.embedding is not None:
            is_ids = x.dim() == 2 and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
            require(is_ids, given, "integer token ids (B, T)", "this slice has the embedding")
        else:
            is_hidden = x.dim() == 3 and x.shape[-1] == dim and x.is_floating_point()
            require(is_hidden, given, f"hidden states (B, T, {dim})", "this slice has no embedding")
        require(x.shape[1] <= longest, given, f"T <= max_seq_len={longest}", "cut it or raise max_seq_len")

    def slice(self, layers: range, *, embedding: bool, head: bool) -> Self:
        """The chosen part as a model of its own: the same names, and the same modules, not copies."""
        missing = [f"layer {index}" for index in layers if str(index) not in self.layers]
        missing += ["embedding"] if embedding and self.embedding is None else []
        missing += ["head"] if head and self.head is None else []
        given = f"slice: asks for {', '.join(missing)}"
        require(not missing, given, "parts that this model has", "slice the whole model")
        with torch.device("meta"):
            part = type(self)(self.config, layers=layers, embedding=embedding, head=head)
        for name in (*self.FIRST_PARTS * embedding, *self.LAST_PARTS * head):
            setattr(part, name, getattr(self, name))
        part.layers = nn.ModuleDict({str(index): self.layers[str(index)] for index in layers})
        part.training = self.training
        return part

    def drawn_names(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter with the name that its first values come from: a tied head has the embedding's."""
        own = {TIED_NAMES[1]: TIED_NAMES[0]} if self.config.tied_head else {}
        return [(own.get(name, name), parameter) for name, parameter in self.named_parameters()]

    @property
    def tied_parameters(self) -> list[tuple[str, str]]:
        """Pairs of global names that are one parameter of the whole model, wherever the slices put them."""
        return [TIED_NAMES] if self.config.tied_head else []


def _check_slice(num_layers: int, layers: range, has_end: bool) -> None:
    given = f"slice: layers={layers}"
    inside = not layers or (layers.step == 1 and layers[0] >= 0 and layers[-1] < num_layers)
    require(inside, given, f"consecutive layers within 0..{num_layers - 1}", "choose another range")
    require(bool(layers) or has_end, given, "a layer, the embedding or the head", "use fewer stages")
