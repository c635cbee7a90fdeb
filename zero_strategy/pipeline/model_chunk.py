r"""A model chunk, one stage of a rank and what is in flight in it, and its backward in two halves.

The first half of a backward is what the stage before waits for; the other is the gradients of parameters.

    roots (outputs, or the loss)
      |
      N  linear: a node on the way to a stage input -- the input half runs it for this way alone, and keeps the
     / \          gradient that arrived at it
    I   C  the transposed weight, then the parameter: off the way -- the weight half runs N again for this edge alone,
    |   |          then everything below C as an ordinary backward
  input parameter

Both halves take sums in the order of one ordinary backward, so parameters get the same bits. What cannot be run twice,
or would calculate again what is there, is calculated in the input half and only handed over in the weight half:
parameters used by a custom autograd function (it makes all its gradients at once), by a node whose saved tensors have
hooks (activation checkpoints would be recomputed, offloaded tensors fetched again), and those that two operations read
directly (their gradients cannot be told apart once they are summed). With compiled graphs that goes for all parameters
of the stage. Re-entrant checkpoints cannot be cut at all: their whole backward, hooks included, is in the input half.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zero_strategy.pipeline.messages import Structure, TensorKind, kind_of, put_together, take_apart
from zero_strategy.runtime.torch_private import FunctionNode, has_tensor_hooks


class StageMessage(NamedTuple):
    """Data of a message from a stage to its neighbour.

    Attributes:
        structure: Around the tensors.
        kinds: What they are; those that want a gradient get one back.
        tensors: They themselves. In gradients: None where there is none.
    """

    structure: Structure
    kinds: tuple[TensorKind, ...]
    tensors: tuple[Tensor, ...]


@dataclass
class _InFlight:
    """A micro-batch between its forward and the end of its backward."""

    inputs: list[GradientEdge] = field(default_factory=list)
    """Whose gradients go back."""
    roots: list[GradientEdge] = field(default_factory=list)
    split: SplitBackward | None = None


class Chunk:
    """A stage.

    Args:
        module: Takes what the stage before returned, or the inputs of a micro-batch.
        stage: Its number among all stages.
        last: Whether it is the last of all.
    """

    def __init__(self, module: Callable[[Any], Any], stage: int, last: bool) -> None:
        self.module, self.stage, self.last = module, stage, last
        self._in_flight: dict[int, _InFlight] = {}
        self._structure: Structure | None = None
        # Autograd makes a node of `Entrance` only if an input requires a gradient, and received tensors do not.
        self._anchor = torch.empty((), requires_grad=True)
        self.seen: Structure | None = None

    def accept(self, micro_batch: int, stage_message: StageMessage, training: bool) -> Any:
        """The input of a forward, from what the stage before gave: a graph begins at tensors that want a gradient."""
        flight = self._in_flight[micro_batch] = _InFlight()
        tensors = list(stage_message.tensors)
        wanting = [i for i, kind in enumerate(stage_message.kinds) if training and kind.wants_gradient]
        if wanting:
            entered = Entrance.apply(self._anchor, *(tensors[i] for i in wanting))
            # Noted before the stage runs: one that changes its input in place gives the tensor another edge.
            flight.inputs = [get_gradient_edge(tensor) for tensor in entered]
            for i, tensor in zip(wanting, entered):
                tensors[i] = tensor
        self.seen = stage_message.structure
        return put_together(tensors, stage_message.structure)

    def forward(self, micro_batch: int, value: Any) -> Any:
        """Run the module."""
        self._in_flight.setdefault(micro_batch, _InFlight())  # Inputs of the first stage do not come by `accept`
        found = self.module(value)
        # Not before: this is the last input that went through, the one that `changed` compares with.
        self._structure = self.seen
        return found

    def pack(self, micro_batch: int, outputs: Any, training: bool) -> StageMessage:
        """Tensors that go to the next stage; of the outputs, only their places in the graph are kept.

        Raises:
            TypeError: If something in the outputs cannot be sent.
        """
        tensors, structure = take_apart(outputs)
        wanting = [training and tensor.requires_grad for tensor in tensors]
        kinds = tuple(kind_of(tensor, wants) for tensor, wants in zip(tensors, wanting))
        if training:
            self._in_flight[micro_batch].roots = [get_gradient_edge(t) for t, wants in zip(tensors, wanting) if wants]
        else:
            del self._in_flight[micro_batch]
        return StageMessage(structure, kinds, tuple(tensor.detach() for tensor in tensors))

    def end(self, micro_batch: int, loss: Tensor | None) -> None:
        """The last stage's forward is over; its backward begins at the loss. None: there will be none."""
        if loss is None:
            del self._in_flight[micro_batch]
            return
        self._in_flight[micro_batch].roots = [get_gradient_edge(loss)] if loss.requires_grad else []

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> StageMessage:
        """An ordinary backward; returns the gradients of the inputs."""
        flight = self._in_flight.pop(micro_batch)
        roots, there = self._match(micro_batch, flight, gradients)
        return _gradients(whole_backward(roots, there, flight.inputs))

    def backward_input(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> StageMessage:
        """The input half of a backward; returns the gradients of the inputs."""
        flight = self._in_flight[micro_batch]
        roots, there = self._match(micro_batch, flight, gradients)
        flight.split = SplitBackward(roots, there, flight.inputs)
        found = flight.split.input_half()
        # The split has what it needs; edges would keep the graph alive until the weight half.
        flight.inputs, flight.roots = [], []
        return _gradients(found)

    def backward_weight(self, micro_batch: int) -> None:
        """The weight half of a backward."""
        flight = self._in_flight.pop(micro_batch)
        assert flight.split is not None, micro_batch
        flight.split.weight_half()

    def clear(self) -> None:
        """Forget what is in flight."""
        self._in_flight.clear()

    @property
    def changed(self) -> tuple[Structure, Structure] | None:
        """The structures of the last input that went through and of the present one, if they differ."""
        before, now = self._structure, self.seen
        return (before, now) if before is not None and now is not None and before != now else None

    def _match(
        self, micro_batch: int, flight: _InFlight, gradients: Sequence[Tensor | None]
    ) -> tuple[list[GradientEdge], list[Tensor | None]]:
        """The outputs that have a gradient, and it. The loss has none: it is a one."""
        if self.last:
            return flight.roots, [None] * len(flight.roots)
        if len(gradients) != len(flight.roots):
            raise ValueError(
                f"{len(gradients)} gradients came back for micro-batch {micro_batch}, of which stage {self.stage} sent "
                f"{len(flight.roots)} tensors that want one"
            )
        pairs = [(root, gradient) for root, gradient in zip(flight.roots, gradients) if gradient is not None]
        return [root for root, _ in pairs], [gradient for _, gradient in pairs]


def _gradients(found: Sequence[Tensor | None]) -> StageMessage:
    """Gradients in the order of the tensors that wanted one; None stands in the structure."""
    with torch.no_grad():
        tensors, structure = take_apart([None if one is None else one.detach() for one in found])
    return StageMessage(structure, tuple(kind_of(tensor, False) for tensor in tensors), tuple(tensors))


Root = GradientEdge | Tensor
_Edge = tuple[Any, int]
"""A node of the graph and the number of one of its outputs (seen from the forward)."""

_REENTRANT = "CheckpointFunctionBackward"
"""Runs a backward inside its backward, and allows no other way."""
_COMPILED = "CompiledFunctionBackward"
"""Gives the memory of what it saved away: a graph with it can only be run as a whole, and once."""


def whole_backward(
    roots: Sequence[Root], gradients: Sequence[Tensor | None], inputs: Sequence[Root]
) -> list[Tensor | None]:
    """An ordinary backward.

    Args:
        roots: What the stage made: tensors or their gradient edges.
        gradients: Of each; None is a one, for a scalar.
        inputs: Tensors, or their gradient edges, whose gradients are wanted: leaves, or what `Entrance` has made.

    Returns:
        The gradients of `inputs`; None where nothing depends on one.
    """
    # Asked for gradients of some inputs, autograd would leave the parameters out: so it is asked for none, and hooks on
    # the inputs' nodes see theirs pass.
    edges = [_edge_of(one) for one in inputs]
    arrived: dict[Any, tuple[Tensor | None, ...]] = {}
    with contextlib.ExitStack() as stack:
        for node in {node for node, _ in edges}:
            stack.callback(node.register_prehook(partial(_note, arrived, node)).remove)
        if roots:
            torch.autograd.backward([GradientEdge(*_edge_of(root)) for root in roots], list(gradients))
    for one in inputs:
        # A leaf has been given its gradient as well, and would add the next one to it.
        if isinstance(one, Tensor):
            one.grad = None
    return [arrived[node][number] if node in arrived else None for node, number in edges]


class Entrance(torch.autograd.Function):
    """Makes stage inputs of tensors: with a graph that ends here, and unlike leaves they may be changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Aliases of the tensors; `anchor` is any leaf that requires a gradient, and never gets one."""
        ctx.set_materialize_grads(False)  # Else zeros are made for missing gradients, which nobody reads here
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        """Gradients are taken where they arrive at this node."""
        return (None,) * (1 + len(gradients))


class SplitBackward:
    """The backward of one micro-batch through one stage, in two calls.

    Args:
        roots: What the stage made: tensors or their gradient edges. Those without a gradient are left out.
        gradients: Of each; None is a one, for a scalar.
        inputs: As for `whole_backward`; may be empty.

    Attributes:
        deferred: Frontier nodes that the weight half will run, for tests.
        early: Parameters whose gradients the input half calculates.
        whole: The input half is the whole backward.
    """

    def __init__(self, roots: Sequence[Root], gradients: Sequence[Tensor | None], inputs: Sequence[Root]) -> None:
        self._roots, self._gradients, self._inputs = list(roots), list(gradients), list(inputs)
        self._kept: list[_Kept] = []
        self._parts: list[_Part] = []
        self._order: list[_Kept] = []
        self._rest = not self._inputs  # nobody waits: everything is the weight half's
        self.deferred, self.early, self.whole = 0, 0, False

    def input_half(self) -> list[Tensor | None]:
        """The gradients of the inputs, in their order; None where nothing depends on one. To be called once."""
        if self._rest or not self._roots:
            return [None] * len(self._inputs)
        graph = _Graph([_edge_of(root) for root in self._roots], [_edge_of(leaf) for leaf in self._inputs])
        self.whole = graph.has(_REENTRANT)
        if self.whole:
            found = whole_backward(self._roots, self._gradients, self._inputs)
        else:
            found = self._run_input_half(graph)
        # Parts and kept nodes hold all that the weight half starts from; if the whole backward has run, it finds
        # nothing.
        self._roots, self._gradients, self._inputs = [], [], []
        return found

    def weight_half(self) -> None:
        """Add the gradients of parameters to them, through their usual hooks. To be called once, after the other."""
        if self._rest:
            whole_backward(self._roots, self._gradients, ())
        # Those that wait for no node: they begin at a root, or were calculated in the input half.
        for part in self._parts:
            part.try_finish()
        # In the order of the input half, which is that of one ordinary backward: so sums keep their bits.
        for kept in self._order:
            kept.run()
        self._roots, self._gradients, self._kept, self._order, self._parts = [], [], [], [], []

    def _run_input_half(self, graph: _Graph) -> list[Tensor | None]:
        parts = graph.parts()
        self._parts = parts
        outputs: list[GradientEdge] = []
        gradients: list[Tensor | None] = []
        for root, gradient in zip(self._roots, self._gradients):
            edge = _edge_of(root)
            part = graph.part_of.get(edge[0])
            if part is not None and not part.early:  # From here only parameters can be reached
                part.add(edge, gradient)
            else:
                outputs.append(GradientEdge(*edge))
                gradients.append(gradient)
        again = graph.deferred_edges()
        self._kept = [_Kept(node, edges, graph, self._order) for node, edges in again.items()]
        leaves = [(part, leaf) for part in parts if part.early for leaf in part.leaves]
        wanted = [_edge_of(leaf) for leaf in self._inputs] + [(leaf, 0) for _, leaf in leaves]
        self.deferred, self.early = len(self._kept), len(leaves)
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if outputs:
            edges = [GradientEdge(*edge) for edge in wanted]
            # `grad` runs only what leads to the edges that are asked for. Saved tensors stay for nodes that run again;
            # without such nodes they go as the backward gets on.
            found = torch.autograd.grad(outputs, edges, gradients, retain_graph=bool(self._kept), allow_unused=True)
        for kept in self._kept:
            kept.settle()
        count = len(self._inputs)
        for (part, leaf), gradient in zip(leaves, found[count:]):
            if gradient is not None:
                part.add((leaf, 0), gradient)
        # The graph was retained as a whole, so most of what is saved is of no use any more.
        if self._kept:
            graph.release(keep=again)
        return list(found[:count])


class _Graph:
    """Nodes under the roots, and those of them that lead to the inputs."""

    def __init__(self, roots: Sequence[_Edge], inputs: Sequence[_Edge]) -> None:
        self.edges: dict[Any, list[_Edge]] = {}
        self.parents: dict[Any, list[Any]] = {}
        self._kinds: set[str] = set()
        self.part_of: dict[Any, _Part] = {}
        ends = {node for node, _ in inputs}
        waiting = [node for node, _ in roots]
        # No recursion: the graph of a stage may be deeper than Python's recursion limit.
        while waiting:
            node = waiting.pop()
            if node in self.edges:
                continue
            self._kinds.add(type(node).__name__)
            # Nodes below the inputs are not this stage's: its backward ends at the inputs.
            below = () if node in ends else node.next_functions
            edges = self.edges[node] = [edge for edge in below if edge[0] is not None]
            for child, _ in edges:
                self.parents.setdefault(child, []).append(node)
                waiting.append(child)
        self.on_the_way: set[Any] = set()
        waiting = list(ends)
        while waiting:
            node = waiting.pop()
            if node not in self.on_the_way:
                self.on_the_way.add(node)
                waiting += self.parents.get(node, ())

    def has(self, kind: str) -> bool:
        """True if there is a node of a class of this name."""
        return kind in self._kinds

    def parts(self) -> list[_Part]:
        """Nodes off the way, in connected parts: each is run as a whole."""
        parts: list[_Part] = []
        # Its node gives all gradients of the stage in its one run, so no parameter's can wait.
        early = self.has(_COMPILED)
        for node in self.edges:
            if node in self.on_the_way or node in self.part_of:
                continue
            part = _Part(early=early)
            parts.append(part)
            waiting = [node]
            while waiting:
                one = waiting.pop()
                if one in self.part_of or one in self.on_the_way:
                    continue
                self.part_of[one] = part
                part.early = part.early or self._must_be_early(one)
                children = self.edges[one]
                if not children:
                    part.leaves.append(one)
                waiting += [child for child, _ in children]
                waiting += self.parents.get(one, ())
        return parts

    def _must_be_early(self, node: Any) -> bool:
        """True if what comes to a node from the way can only be had while the way is run."""
        parents = self.parents.get(node, [])
        crossing = [parent for parent in parents if parent in self.on_the_way]
        if not crossing:
            return False
        # Autograd sums what several nodes give before the next one runs: what each gave cannot be had afterwards.
        several = any(parent is not parents[0] for parent in parents)
        return several or _runs_once(crossing[0])

    def deferred_edges(self) -> dict[Any, list[_Edge]]:
        """Edges from nodes on the way to parameters, by node: they are left to the weight half."""
        found: dict[Any, list[_Edge]] = {}
        for node in self.on_the_way:
            edges = {edge for edge in self.edges.get(node, ()) if edge[0] in self.part_of}
            late = [edge for edge in edges if not self.part_of[edge[0]].early]
            if late:
                found[node] = late
        return found

    def release(self, keep: Container[Any]) -> None:
        """Let go of what nodes have saved that will not be run again; `keep`: those on the way that will be."""
        for node in self.edges:
            part = self.part_of.get(node)
            if node not in keep and (part is None or part.early):
                _drop_saved(node)


@dataclass(eq=False)
class _Part:
    """Connected nodes off the way: usually one parameter with what is made of it before it is used."""

    leaves: list[Any] = field(default_factory=list)
    early: bool = False
    waits: int = 0
    """Nodes on the way that have not given it their gradients yet."""
    roots: list[_Edge] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)

    def add(self, edge: _Edge, gradient: Tensor | None) -> None:
        self.roots.append(edge)
        self.gradients.append(gradient)

    def try_finish(self) -> None:
        """The ordinary backward of this part, once everything is there that it starts from."""
        if self.waits or not self.roots:
            return
        with contextlib.ExitStack() as stack:
            if self.early:
                for (leaf, _), gradient in zip(self.roots, self.gradients):
                    if has_tensor_hooks(leaf.variable):  # they have run when the gradient was captured
                        stack.callback(leaf.register_prehook(partial(_replaced, gradient)).remove)
            torch.autograd.backward([GradientEdge(*edge) for edge in self.roots], self.gradients)
        self.roots, self.gradients = [], []


class _Kept:
    """A node on the way with edges towards parameters: keeps the gradients that arrive at it.

    Keeping them in a hook of the node, and giving them back there, makes a second run see what hooks on tensors made
    of them the first time.
    """

    def __init__(self, node: Any, edges: list[_Edge], graph: _Graph, order: list[_Kept]) -> None:
        self._node, self._edges, self._order = node, edges, order
        self._gradients: tuple[Tensor | None, ...] | None = None
        self._parts = [graph.part_of[edge[0]] for edge in edges]
        for part in set(self._parts):
            part.waits += 1
        # Before the input half runs, as gradients pass only once.
        self._hook = node.register_prehook(self._arrived)

    def _arrived(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if self._gradients is not None:
            return self._gradients
        self._gradients = gradients
        self._order.append(self)
        return None

    def settle(self) -> None:
        """After the input half: what nothing arrived at has nothing to give."""
        if self._gradients is None:
            self._hook.remove()
            for part in set(self._parts):
                part.waits -= 1

    def run(self) -> None:
        """The node's gradients towards parameters, and with them every part that has waited for this node only."""
        assert self._gradients is not None
        # Outputs without a gradient are left out: autograd takes None for a one.
        there = [(number, gradient) for number, gradient in enumerate(self._gradients) if gradient is not None]
        found: Sequence[Tensor | None] = [None] * len(self._edges)
        if there:
            found = torch.autograd.grad(
                [GradientEdge(self._node, number) for number, _ in there],
                [GradientEdge(*edge) for edge in self._edges],
                [gradient for _, gradient in there],
                allow_unused=True,
            )
        # After the run, in which it gives the node the gradients of the first one.
        self._hook.remove()
        for edge, part, gradient in zip(self._edges, self._parts, found):
            if gradient is not None:
                part.add(edge, gradient)
        self._gradients = ()
        for part in dict.fromkeys(self._parts):  # Each once, but in order, which a set has not
            part.waits -= 1
            part.try_finish()


def _edge_of(root: Root) -> _Edge:
    edge = root if isinstance(root, GradientEdge) else get_gradient_edge(root)
    return edge.node, edge.output_nr


def _runs_once(node: Any) -> bool:
    """True if a second run would do again what the first one did, or could not be done."""
    if isinstance(node, FunctionNode):
        return True
    return any(saved.unpack_hook is not None for saved in _saved(node))


def _drop_saved(node: Any) -> None:
    for saved in _saved(node):
        with contextlib.suppress(RuntimeError):  # nothing saved, or something with hooks of its own
            # A hook is called at once, and what it returns, None, takes the saved tensor's place: its memory goes.
            saved.register_hooks(_nothing, _nothing)


def _note(arrived: dict[Any, tuple[Tensor | None, ...]], node: Any, gradients: tuple[Tensor | None, ...]) -> None:
    arrived[node] = gradients


def _replaced(gradient: Tensor | None, _: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    return (gradient,)


def _nothing(_: Any) -> None:
    return None


def _saved(node: Any) -> list[Any]:
    found: list[Any] = []
    for name in _saved_names(node.__class__):
        with contextlib.suppress(RuntimeError):  # released already
            value = getattr(node, name)
            found += value if isinstance(value, (tuple, list)) else [value]
    return [saved for saved in found if saved is not None]


# By class, as looking a node's members up takes long; bounded, since an entry keeps a user's class alive.
@lru_cache(maxsize=512)
def _saved_names(kind: Hashable) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))  # Others unpack what is saved
