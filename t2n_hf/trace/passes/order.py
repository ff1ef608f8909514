"""Order of nodes: that of their use, whatever order they were made in."""

from collections.abc import Iterator

from torch import fx

from t2n_hf.trace.passes.result import PassResult

__all__ = ["order_by_use"]


def order_by_use(graph: fx.Graph) -> PassResult:
    """Put each node where the results first need it, inputs as they are.

    Models go through sets of names (the kinds of their layers), whose order is another one in each process: the same
    model must give the same graph.
    """
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    output = nodes.pop()
    wanted = list(_by_use(output))
    reached = set(wanted)
    wanted += [node for node in nodes if node not in reached]  # used by nobody, kept for what they do
    if wanted == nodes:
        return PassResult(graph, False)
    for node in wanted:
        output.prepend(node)
    return PassResult(graph, True)


def _by_use(output: fx.Node) -> Iterator[fx.Node]:
    """Give what `output` needs, each node after its own arguments."""
    seen: set[fx.Node] = set()
    open_: list[tuple[fx.Node, Iterator[fx.Node]]] = [(output, iter(output.all_input_nodes))]
    while open_:
        node, arguments = open_[-1]
        argument = next((one for one in arguments if one not in seen), None)
        if argument is not None:
            seen.add(argument)
            if argument.op != "placeholder":
                open_.append((argument, iter(argument.all_input_nodes)))
            continue
        open_.pop()
        if open_:
            yield node
