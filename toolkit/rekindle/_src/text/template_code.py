"""Chat templates, parsed once: a template's variables and texts, and its program.

A template is a stranger's text, and all questions about it are answered from Jinja's tree. Its length, its tokens and
the depth of the tree are bounded before Jinja compiles it, and so is the code that Python compiles then. In the
program, each operation is one of `template_operations.py` or `template_filters.py`, which counts what it costs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.lexer import Token, TokenStream
from jinja2.runtime import LoopContext, Macro

from rekindle._src.text import template_filters
from rekindle._src.text import template_operations as operations
from rekindle._src.text.template_limits import TemplateLimit, TemplateRefusal, current, joined, metered, text_of

# The longest of 178 templates of published models has 19,600 characters, 2,600 tokens, 29 levels, and 60,000
# characters of Python.
MAX_TEMPLATE = 1 << 17  # characters of a template
_TOKENS = 1 << 13
_DEPTH = 100  # levels of the tree
_PYTHON = 3 << 16  # characters of the Python code, which Python compiles in 90 ms and in one go
_TAGS: dict[type[nodes.Node], str] = {
    nodes.Extends: "extends", nodes.Include: "include", nodes.Import: "import", nodes.FromImport: "from",
    nodes.Block: "block", nodes.ScopedEvalContextModifier: "autoescape",
}  # fmt: skip
_SCALARS = (str, int, float, bool, type(None))


class TemplateCode:
    """A chat template that was parsed. Its questions are answered from the tree; `program` compiles it when needed."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree: nodes.Template | None = tree
        self._program: jinja2.Template | None = None
        self._lock = threading.Lock()  # compiling changes the tree
        names, fields, strings, texts = set(), set(), [], []
        blocks: set[object] = set()
        self.refuses_tools = False  # it raises an error of its own where there are some
        for node in _nodes(tree):
            if isinstance(node, nodes.Name):
                if node.ctx == "load":
                    names.add(node.name)
            elif isinstance(node, nodes.Getattr):
                fields.add(node.attr)
            elif isinstance(node, nodes.TemplateData):
                texts.append(node.data)
            elif isinstance(node, nodes.Const):
                if isinstance(node.value, str):
                    strings.append(node.value)
            elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
                fields.add(node.arg.value)
            elif isinstance(node, nodes.Compare):
                blocks.update(_block_kinds(node))
            elif isinstance(node, nodes.If):
                self.refuses_tools = self.refuses_tools or _refuses_tools(node)
            elif type(node) in _TAGS:
                raise TemplateRefusal(f"the tag {{% {_TAGS[type(node)]} %}}")
        self._names = frozenset(names)
        self._fields = frozenset(fields)
        self._strings = frozenset(strings)
        self._texts = "\n".join(strings + texts)
        self._blocks = frozenset(blocks)

    def reads(self, name: str) -> bool:
        """True if it uses a variable."""
        return name in self._names

    def compares(self, text: str) -> bool:
        """True if it has this text as a string of its own."""
        return text in self._strings

    def reads_field(self, name: str) -> bool:
        """True if it reads a field with this name, of a message or of anything else."""
        return name in self._fields or name in self._strings

    def writes(self, text: str) -> bool:
        """True if the text is in one of its strings, or in its output."""
        return text in self._texts

    @property
    def thinks_in_blocks(self) -> bool:
        """True if it takes reasoning from blocks of a message's content alone, as Ministral's does."""
        return "thinking" in self._blocks and not self.reads_field("reasoning_content")

    @property
    def reads_tools_of_messages(self) -> bool:
        """True if it takes tools from a message rather than from a variable, as Phi-4-mini's does."""
        return "tools" in self._fields

    @property
    def takes_tools(self) -> bool:
        """True if it shows tools to the model."""
        return self.reads("tools") or self.reads("xml_tools") or self.reads_tools_of_messages

    @property
    def reads_calls(self) -> bool:
        """True if it shows the calls in an assistant's message."""
        return "tool_calls" in self._fields or "tool_calls" in self._strings or "tool_calls" in self._names

    def program(self) -> jinja2.Template:
        """Return the compiled template. May raise any exception."""
        with self._lock:
            if self._program is None:
                with metered():
                    assert self._tree is not None, "a template is compiled once"
                    tree, self._tree = self._tree, None
                    _counting(tree)
                    self._program = _environment().from_string(tree)
            return self._program

    def render(self, scope: dict[str, Any]) -> str:
        """Return its output. May raise any exception, including `TemplateLimit`."""
        program = self.program()
        with metered():
            return joined(program.generate(scope))


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> TemplateCode:
    """Return a template by its text. Raises `TemplateLimit`, `TemplateRefusal`, or any exception of Jinja's."""
    if len(text) > MAX_TEMPLATE:
        raise TemplateLimit(f"it has {len(text):,} characters, and at most {MAX_TEMPLATE:,} are allowed")
    return TemplateCode(_environment().parse(text))


def _refuses_tools(node: nodes.If) -> bool:
    """True for `{% if tools %}{{ raise_exception("…") }}{% endif %}`."""
    written = [part for line in node.body if isinstance(line, nodes.Output) for part in line.nodes]
    called = [part.node.name for part in written if isinstance(part, nodes.Call) and isinstance(part.node, nodes.Name)]
    return isinstance(node.test, nodes.Name) and node.test.name == "tools" and "raise_exception" in called


def _block_kinds(node: nodes.Compare) -> Iterator[object]:
    """Yield the texts that a comparison takes the type of something for."""
    sides = [node.expr, *(operand.expr for operand in node.ops)]
    named = [side.arg.value for side in sides if isinstance(side, nodes.Getitem) and isinstance(side.arg, nodes.Const)]
    named += [side.attr for side in sides if isinstance(side, nodes.Getattr)]
    if "type" in named:
        yield from (side.value for side in sides if isinstance(side, nodes.Const))


def _nodes(tree: nodes.Template) -> Iterator[nodes.Node]:
    """Yield the nodes of a tree. Raises `TemplateLimit` for too deep a one, before anything recurses into it."""
    todo: list[tuple[nodes.Node, int]] = [(tree, 1)]
    while todo:
        node, depth = todo.pop()
        if depth > _DEPTH:
            raise TemplateLimit(f"it is nested more than {_DEPTH} levels deep")
        yield node
        todo += [(child, depth + 1) for child in node.iter_child_nodes()]


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with every operation replaced by one of this project's."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    concat = staticmethod(joined)  # joins the output of macros and blocks

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.finalize = lambda value: value if type(value) is str else text_of(current(), value)
        self.globals = dict(operations.FUNCTIONS)
        for kind, known, functions in (
            ("filter", template_filters.FILTERS, self.filters), ("test", template_filters.TESTS, self.tests)
        ):  # fmt: skip
            for name in set(functions) - set(known):
                functions[name] = _refused(f"the {kind} {name!r}")
        self.filters.update({name: _filter(operation) for name, operation in template_filters.FILTERS.items()})
        self.filters.update(_INNER)
        self.tests.update(template_filters.TESTS)

    def _compile(self, source: str, filename: str) -> Any:
        if len(source) > _PYTHON:
            raise TemplateLimit(f"it makes {len(source):,} characters of code, and at most {_PYTHON:,} are allowed")
        return super()._compile(source, filename)

    def getattr(self, obj: Any, attribute: str) -> Any:
        return operations.attribute(self, obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return operations.item(self, obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return operations.binary(operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in jinja2)
        meter = current()
        meter.step()
        kind = type(__obj)
        if kind is operations.Function:
            kwargs.pop("_loop_vars", None)  # for functions that take Jinja's context
            kwargs.pop("_block_vars", None)
            return __obj.operation(meter, __obj.owner, *args, **kwargs)
        if kind is Macro or kind is LoopContext:
            return __context.call(__obj, *args, **kwargs)
        if isinstance(__obj, jinja2.Undefined):
            return __obj()
        raise TypeError(f"{kind.__name__!r} object is not callable")


def _filter(operation: operations.Operation) -> Callable[..., Any]:
    @jinja2.pass_environment
    def filtered(environment: Any, value: Any, /, *args: Any, **named: Any) -> Any:
        meter = current()
        meter.step()
        return operation(environment, meter, value, *args, **named)

    return filtered


def _refused(what: str) -> Callable[..., Any]:
    def refused(*args: Any, **named: Any) -> Any:
        raise TemplateRefusal(what)

    return refused


# Operations of Jinja's syntax that its environment doesn't pass on, as filters with names no template can spell.
_INNER: dict[str, Callable[..., Any]] = {
    "a loop": operations.Rounds, "a list": operations.counted, "a dict": operations.mapping, "a slice": operations.cut,
    "a text": operations.written, "a comparison": operations.compared,
    **{f"a {name} b": function for name, function in operations.COMPARISONS.items()},
}  # fmt: skip


def _counting(node: nodes.Node) -> None:
    """Replace uncounted operations by counted ones, in the tree below a node."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_counted(each) for each in value])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _counted(value))


def _counted(node: Any) -> Any:
    if not isinstance(node, nodes.Node):
        return node
    if isinstance(node, nodes.Compare):
        return _compared(node)
    scalars = isinstance(node, nodes.Dict) and all(_is_scalar(pair.key) for pair in node.items)
    _counting(node)
    if isinstance(node, nodes.For):
        node.iter = _inner("a loop", node.iter)
    elif isinstance(node, nodes.Concat):
        return _inner("a text", nodes.List(node.nodes))
    elif isinstance(node, nodes.List) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _inner("a list", node)
    elif isinstance(node, nodes.Dict):
        if scalars:
            return _inner("a list", node)
        return _inner("a dict", nodes.List([nodes.Tuple([pair.key, pair.value], "load") for pair in node.items]))
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        part = node.arg
        return _inner("a slice", node.node, *(each or nodes.Const(None) for each in (part.start, part.stop, part.step)))
    return node


def _compared(node: nodes.Compare) -> nodes.Expr:
    first, operands = node.ops[0], node.ops
    if len(operands) == 1 and first.op in ("in", "notin") and _is_list_of_scalars(first.expr):
        node.expr = _counted(node.expr)
        return node
    # A comparison with a constant ends after as many characters as that has.
    short = len(operands) == 1 and first.op not in ("in", "notin") and (_is_scalar(node.expr) or _is_scalar(first.expr))
    _counting(node)
    if short:
        return node
    if len(operands) == 1:
        return _inner(f"a {first.op} b", node.expr, first.expr)
    operators = nodes.Const(tuple(operand.op for operand in operands))
    return _inner("a comparison", operators, nodes.List([node.expr, *(operand.expr for operand in operands)]))


def _inner(name: str, value: nodes.Node, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None, lineno=value.lineno)


def _is_scalar(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, _SCALARS)


def _is_list_of_scalars(node: nodes.Node) -> bool:
    return isinstance(node, nodes.List | nodes.Tuple) and all(map(_is_scalar, node.items))


class _Generation(jinja2.ext.Extension):
    """The tags `{% generation %} … {% endgeneration %}` around the assistant's words, rendered as their content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Bounds(jinja2.ext.Extension):
    """Counts tokens while they are parsed."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for count, token in enumerate(stream):
            if count > _TOKENS:
                raise TemplateLimit(f"it has more than {_TOKENS:,} tokens")
            yield token


@functools.cache
def _environment() -> _Environment:
    return _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Bounds, _Generation, jinja2.ext.loopcontrols]
    )
