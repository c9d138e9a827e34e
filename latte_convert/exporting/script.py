"""A graph of ``torch.export`` as TorchScript, whose sizes stay open: a trace would keep those of its example."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx


def script(program: Any) -> Any:
    """Write a graph's operators as a function of TorchScript.

    Args:
        program: A ``torch.export.ExportedProgram``.

    Returns:
        A ``torch.jit.ScriptModule`` that takes the same inputs by name.

    Raises:
        Exception: Whatever ``torch.jit.script`` makes of an operator that TorchScript has not.
    """
    module = program.module(check_guards=False)
    graph: fx.Graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if not node.target._schema.returns:  # assertions about the example
            graph.erase_node(node)
            continue
        node.target = node.target.overloadpacket  # TorchScript finds the overload itself
        read = partial(_number, node)
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), read)
    graph.eliminate_dead_code()
    jit: Any = torch.jit
    return jit.script(fx.GraphModule(module, graph).requires_grad_(False))


def _number(before: fx.Node, value: Any) -> Any:
    """NaN and infinity have no literals in TorchScript: they are read from words."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    with before.graph.inserting_before(before):
        return before.graph.call_function(float, (str(value),))
