"""Ways in which a mod reads state. `state_programs` tells how a block is written."""

from __future__ import annotations

TEXT = """
## global number: width$
width$ = 5

## global float: slope$
slope$ = 0.5

## global of a global function: twice$(q) - q
offset$ = 3
def plus$(x):
    return x + offset$
def twice$(x):
    return plus$(x) + plus$(0)

## None or a number: width$ if width$ is not None else 2
width$ = None

## number that decides: first$ if flag$ else second$
flag$, first$, second$ = True, 3, 4.5

## comparison of numbers: 1 if low$ < high$ <= most$ else 2
low$, high$, most$ = 3, 5, 8

## instance: cfg$.width + cfg$.shift
class Cfg$:
    def __init__(self, width, shift):
        self.width, self.shift = width, shift
cfg$ = Cfg$(3, 0.5)

## attribute of a class: cfg$.width
class Cfg$:
    width = 3
cfg$ = Cfg$()

## inherited attribute: cfg$.width + Sub$.shift
class Base$:
    width = 3
    shift = 1
class Middle$(Base$):
    pass
class Other$(Base$):
    width = 8
class Sub$(Middle$):
    pass
cfg$ = Sub$()

## super: cfg$.total()
class Base$:
    width = 3
    def total(self):
        return self.width
class Left$(Base$):
    def total(self):
        return super().total() * 2
class Right$(Base$):
    step = 1
    def total(self):
        return super().total() + self.step
class Both$(Left$, Right$):
    def total(self):
        return super().total() + 1
class Flat$(Base$):
    pass
cfg$ = Both$()

## super with arguments: cfg$.total()
class Base$:
    width = 3
    @property
    def size(self):
        return self.width + 1
class Sub$(Base$):
    width = 4
    @property
    def size(self):
        return super(Sub$, self).size * 2
    def total(self):
        return self.size
cfg$ = Sub$()

## slots: cfg$.width * cfg$.factor
class Cfg$:
    __slots__ = ("width", "factor")
    def __init__(self):
        self.width, self.factor = 3, 0.5
class Next$(Cfg$):
    __slots__ = ("more",)
cfg$ = Next$()

## slot without a value: width$(cfg$)
class Cfg$:
    __slots__ = ("width", "factor")
cfg$ = Cfg$()
cfg$.factor = 2
def width$(cfg):
    try:
        return cfg.width
    except AttributeError:
        return cfg.factor + 1

## property: cfg$.size
class Cfg$:
    margin = 1
    def __init__(self):
        self._width = 3
    @property
    def size(self):
        return self._width + self.margin
    @size.setter
    def size(self, value):
        self._width = value
cfg$ = Cfg$()

## data descriptor: cfg$.width
class Field$:
    scale = 2
    def __init__(self, default):
        self.default = default
    def __set_name__(self, owner, name):
        self.name = "_" + name
    def __get__(self, obj, owner=None):
        return getattr(obj, self.name, self.default) * self.scale
    def __set__(self, obj, value):
        setattr(obj, self.name, value)
class Cfg$:
    width = Field$(4)
    height = Field$(5)
cfg$ = Cfg$()
cfg$.height = 2

## non-data descriptor: cfg$.width
class Field$:
    def __init__(self, default):
        self.default = default
    def __get__(self, obj, owner=None):
        return self.default if obj is None else self.default + obj.extra
class Cfg$:
    width = Field$(4)
    extra = 1
cfg$ = Cfg$()

## property of a metaclass: Cfg$.size
class Meta$(type):
    margin = 1
    @property
    def size(cls):
        return cls.width + type(cls).margin
class Cfg$(metaclass=Meta$):
    width = 4

## call of a metaclass: Cfg$(2).width
class Meta$(type):
    extra = 1
    def __call__(cls, n):
        made = super().__call__(n)
        made.width += cls.extra
        return made
class Cfg$(metaclass=Meta$):
    base = 5
    def __init__(self, n):
        self.width = n + self.base

## operators of a metaclass: Cfg$["a"] + len(Cfg$) + (3 in Cfg$) + sum(Cfg$) + Cfg$.unknown
class Meta$(type):
    items = {"a": 4}
    def __getitem__(cls, key):
        return cls.items[key]
    def __len__(cls):
        return cls.length
    def __contains__(cls, x):
        return x in cls.members
    def __iter__(cls):
        return iter(cls.members)
    def __getattr__(cls, name):
        return len(name)
class Cfg$(metaclass=Meta$):
    length = 3
    members = [3, 4]

## dataclass: cfg$.width + cfg$.inner.step + cfg$.sizes[1]
@dataclasses.dataclass
class Inner$:
    step: int = 2
@dataclasses.dataclass
class Cfg$:
    width: int
    inner: Inner$ = dataclasses.field(default_factory=Inner$)
    sizes: list = dataclasses.field(default_factory=lambda: [1, 2, 3])
cfg$ = Cfg$(5)

## frozen dataclass with slots: cfg$.width + cfg$.step
@dataclasses.dataclass(frozen=True, slots=True)
class Cfg$:
    width: int = 3
    step: float = 0.5
cfg$ = Cfg$(4)

## dataclass made in the mod: Cfg$(width$).size()
width$ = 4
@dataclasses.dataclass
class Cfg$:
    width: int
    step: int = 2
    def __post_init__(self):
        self.total = self.width * self.step
    def size(self):
        return self.total

## dataclass compared: 1 if cfg$ == Cfg$(3, 1) else 2
@dataclasses.dataclass
class Cfg$:
    width: int
    step: int
cfg$ = Cfg$(3, 1)

## NamedTuple: cfg$.width + cfg$[1] + len(cfg$)
class Cfg$(typing.NamedTuple):
    width: int = 3
    step: float = 0.5
    @property
    def size(self):
        return self.width
cfg$ = Cfg$(4)

## namedtuple unpacked: first$(cfg$)
Cfg$ = collections.namedtuple("Cfg$", "width step")
cfg$ = Cfg$(4, 2)
def first$(cfg):
    width, step = cfg
    return width - step

## Enum: table$[mode$] + mode$.value + (mode$ is Mode$.NEAR)
class Mode$(enum.Enum):
    NEAR = 1
    FAR = 2
mode$ = Mode$.NEAR
table$ = {Mode$.NEAR: 3, Mode$.FAR: 7}

## IntEnum: mode$ + 1 + (mode$ == 1)
class Mode$(enum.IntEnum):
    NEAR = 1
    FAR = 2
mode$ = Mode$.NEAR

## Enum looked up: Mode$(number$).value + Mode$[name$].value
class Mode$(enum.Enum):
    NEAR = 1
    FAR = 2
number$, name$ = 2, "NEAR"

## Flag: 1 if Mode$.A in mode$ else 2
class Mode$(enum.Flag):
    A = 1
    B = 2
    C = 4
mode$ = Mode$.A | Mode$.C

## nested containers: conf$["a"][1]["b"] + conf$["c"][-1]
conf$ = {"a": [1, {"b": 4}], "c": (2, 3.5)}

## dict.get: conf$.get("a", 3) + conf$.get("z", 2)
conf$ = {"a": 1}

## items of a dict: total$(conf$)
conf$ = {"a": 1, "b": 2.5}
def total$(conf):
    total = 0
    for i, (key, value) in enumerate(conf.items()):
        total += value * (i + len(key))
    return total

## keys and values: sum(conf$.values()) + len(list(conf$)) + ("a" in conf$) + len([n for n in conf$.keys() if n > "a"])
conf$ = {"a": 1, "b": 2}

## set: (3 in members$) + 2 * (4 in members$) + len(members$)
members$ = {3, 5}

## frozenset looped: sum(x * 2 for x in members$)
members$ = frozenset((3, 5))

## list: sum(sizes$[1:]) + len(sizes$) + sizes$[0] * 2
sizes$ = [1, 2, 3, 4]

## list of lists: sum(a * b for a, b in pairs$)
pairs$ = [[1, 2], [3, 4]]

## unpacking: rest$(*sizes$) + tail$(sizes$)
sizes$ = [1, 2, 3]
def rest$(first, *others):
    return first * 10 + sum(others)
def tail$(sizes):
    first, *others, last = sizes
    return first - last + len(others)

## arguments from a dict: scaled$(**options$)
options$ = {"width": 3, "step": 2}
def scaled$(width, step=1, *, shift=0):
    return width * step + shift

## subclass of dict: conf$["a"] + conf$["z"] + len(conf$)
class Conf$(dict):
    default = 7
    def __missing__(self, key):
        return self.default
conf$ = Conf$(a=1)

## dict with its own getitem: conf$["a"] + conf$.width
class Conf$(dict):
    shift = 2
    def __getitem__(self, key):
        return dict.__getitem__(self, key) + self.shift
    def __getattr__(self, name):
        return self[name]
conf$ = Conf$(a=1, width=3)

## subclass of list: sizes$[1] + len(sizes$) + sum(sizes$) + sizes$.extra
class Sizes$(list):
    extra = 1
    def __len__(self):
        return 2
sizes$ = Sizes$([3, 4, 5])

## subclass of tuple: pair$[1] + pair$.sum()
class Pair$(tuple):
    factor = 2
    def sum(self):
        return sum(self) * self.factor
pair$ = Pair$((3, 4))

## subclass of int: width$ + width$.more
class Width$(int):
    more = 2
    def __add__(self, other):
        return int(self) * 10 + other
width$ = Width$(3)

## subclass of float: slope$ * 2 + slope$.more
class Slope$(float):
    more = 2
slope$ = Slope$(0.5)

## subclass of str: table$[name$] + len(name$)
class Name$(str):
    pass
name$ = Name$("near")
table$ = {"near": 3, "far": 5}

## partial: scaled$(2)
def scale$(factor, x, shift=0):
    return factor * x + shift
scaled$ = functools.partial(scale$, 3, shift=1)

## nested partials: scaled$()
def scale$(factor, x, shift=0):
    return factor * x + shift
inner$ = functools.partial(scale$, 3)
scaled$ = functools.partial(functools.partial(inner$, shift=2), 4)

## partialmethod: cfg$.twice()
class Cfg$:
    width = 3
    def times(self, n, shift=0):
        return self.width * n + shift
    twice = functools.partialmethod(times, 2, shift=1)
cfg$ = Cfg$()

## nested closures: total$()
def outer$(a):
    def middle(b):
        def inner():
            return a * 10 + b
        return inner
    return middle(2)
total$ = outer$(3)

## closures of a loop: sum(f() * (i + 1) for i, f in enumerate(readers$))
def make$():
    readers = []
    for n in range(3):
        readers.append(lambda: n)
        readers.append(lambda n=n: n)
    return readers
readers$ = make$()

## shared cell: reader$() + twice$()
def make$():
    width = 3
    def reader():
        return width
    def twice():
        return width * 2
    def setter(value):
        nonlocal width
        width = value
    return reader, twice, setter
reader$, twice$, setter$ = make$()

## defaults: scaled$() + other$(1)
def scaled$(width=3, *, step=2):
    return width * step
def other$(x, conf={"a": 4}, sizes=[1, 2]):
    return x + conf["a"] + sizes[1]

## function attributes: helper$.width + helper$()
def helper$():
    return helper$.step
helper$.width, helper$.step = 3, 2

## buffers: gate$(2) + 0 * k
class Gate$(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.tensor([1.0, 2.0, 4.0]))
        self.width = 3
    def forward(self, n):
        return self.table[n] * self.width
gate$ = Gate$()

## parameters: gate$.weight[q % 3] + gate$.bias
class Gate$(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 4.0]))
        self.bias = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
gate$ = Gate$()

## submodules: net$(torch.tensor(2.0))
class Scale$(torch.nn.Module):
    factor = 2.0
    def __init__(self, shift):
        super().__init__()
        self.shift = shift
    def forward(self, x):
        return x * self.factor + self.shift if self.training else x
class Net$(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Scale$(1), Scale$(2)])
        self.named = torch.nn.ModuleDict({"a": Scale$(3)})
        self.values = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.tensor(0.5))})
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.named["a"](x) + self.values["w"]
net$ = Net$()

## Sequential: net$(slope$) + len(net$)
class Scale$(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def forward(self, x):
        return x * self.factor
net$ = torch.nn.Sequential(Scale$(2), Scale$(3))
slope$ = 0.5

## hooks: net$(slope$)
class Scale$(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def forward(self, x):
        return x * self.factor
class Hook$:
    shift = 1
    def __call__(self, module, inputs, output):
        return output + self.shift
net$ = Scale$(2)
net$.register_forward_hook(Hook$())
net$.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
slope$ = 0.5

## getattr: cfg$.width + cfg$.missing
class Cfg$:
    default = 4
    width = 2
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.default + len(name)
cfg$ = Cfg$()

## getattribute: cfg$.width
class Cfg$:
    shift = 1
    def __init__(self):
        self.width = 3
    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        return found + type(self).shift if name == "width" else found
cfg$ = Cfg$()

## proxy: proxy$.width + proxy$.inner.step
class Cfg$:
    width, step = 3, 2
class Proxy$:
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)
proxy$ = Proxy$(Cfg$())

## context manager: inside$()
class Scope$:
    width = 3
    def __enter__(self):
        return self.width
    def __exit__(self, *error):
        return self.swallows
    swallows = True
scope$ = Scope$()
limit$ = 3
def inside$():
    with scope$ as width:
        if width > limit$:
            raise ValueError
        return width
    return 9

## contextmanager: inside$()
width$ = 3
@contextlib.contextmanager
def scope$(n):
    yield n + width$
def inside$():
    with scope$(2) as width, contextlib.suppress(ValueError):
        return width

## contains, iter, len, bool: (3 in box$) + sum(box$) + len(box$) + (2 if box$ else 5) + (2 if not empty$ else 5)
class Box$:
    def __init__(self, *items):
        self.items = list(items)
    def __contains__(self, x):
        return x in self.items
    def __iter__(self):
        return iter(self.items)
    def __len__(self):
        return len(self.items)
class Empty$:
    full = False
    def __bool__(self):
        return self.full
box$, empty$ = Box$(1, 3), Empty$()

## operators: (vec$ + 2) + (2 + vec$) + (vec$ @ vec$) + (-vec$) + vec$[1] + (vec$ < 3) + (vec$ == 3)
class Vec$:
    x = 3
    def __add__(self, other):
        return self.x + other
    def __radd__(self, other):
        return self.x * other
    def __matmul__(self, other):
        return self.x * other.x
    def __neg__(self):
        return -self.x
    def __getitem__(self, i):
        return self.x + i
    def __lt__(self, other):
        return self.x < other
    def __eq__(self, other):
        return self.x == other
vec$ = Vec$()

## subclass that reflects: low$ + high$
class Low$:
    width = 1
    def __add__(self, other):
        return self.width
class High$(Low$):
    width = 2
    def __radd__(self, other):
        return self.width * 3
low$, high$ = Low$(), High$()

## hash and eq: table$[key$]
class Key$:
    def __init__(self, n):
        self.n = n
    def __hash__(self):
        return hash(self.n)
    def __eq__(self, other):
        return self.n == other.n
key$ = Key$(3)
table$ = {Key$(3): 4, Key$(5): 6}

## format: len(f"{cfg$:wide}") + len(f"{cfg$!r}") + len(str(cfg$))
class Cfg$:
    text = "abc"
    def __format__(self, spec):
        return self.text + spec
    def __repr__(self):
        return self.text * 2
    def __str__(self):
        return self.text * 3
cfg$ = Cfg$()

## index, int, float: sizes$[cfg$] + int(cfg$) + float(cfg$)
class Cfg$:
    n = 1
    def __index__(self):
        return self.n
    def __int__(self):
        return self.n + 1
    def __float__(self):
        return self.n + 0.5
cfg$, sizes$ = Cfg$(), [3, 4, 5]

## call: apply$(2) + make$()(1)
class Apply$:
    factor = 3
    def __call__(self, x):
        return x * self.factor
apply$ = Apply$()
def make$():
    return apply$

## generator: sum(count$()) + sum(twice$())
sizes$ = [1, 2]
def count$():
    for n in sizes$:
        yield n + shift$
    return
shift$ = 1
def twice$():
    yield from count$()
    yield shift$

## comprehensions: sum([x * factor$ for x in sizes$ if x > low$]) + max({x + 1 for x in {y: 1 for y in sizes$}})
sizes$, factor$, low$ = [1, 2, 3], 2, 1

## computed name: getattr(cfg$, "wid" + end$) + getattr(cfg$, "nothing", 4) + hasattr(cfg$, "height")
class Cfg$:
    width, widow = 3, 4
cfg$, end$ = Cfg$(), "th"

## vars: vars(cfg$)["width"] + len(vars(cfg$)) + cfg$.__dict__.get("step", 3)
class Cfg$:
    def __init__(self):
        self.width = 3
cfg$ = Cfg$()

## isinstance: isinstance(width$, int) + 2 * (type(slope$) is float) + 4 * isinstance(cfg$, (Base$, str))
width$, slope$ = 3, 0.5
class Base$:
    pass
class Cfg$(Base$):
    pass
class Other$:
    pass
cfg$ = Cfg$()

## issubclass: (1 if issubclass(Cfg$, Base$) else 2) + (1 if type(cfg$) is Cfg$ else 3)
class Base$:
    pass
class Cfg$(Base$):
    pass
class Other$:
    pass
cfg$ = Cfg$()

## match: pick$(width$, cfg$, pair$, conf$)
width$, pair$, conf$ = 3, (1, 2), {"a": 4}
class Cfg$:
    __match_args__ = ("n",)
    n = 5
cfg$ = Cfg$()
def pick$(width, cfg, pair, conf):
    total = 0
    match width:
        case 3:
            total += 1
        case int():
            total += 2
        case _:
            total += 3
    match cfg:
        case Cfg$(n=5):
            total += 10
        case Cfg$(n):
            total += n
    match pair:
        case (x, y):
            total += x + y
        case [x, *rest]:
            total += len(rest)
    match conf:
        case {"a": value, **others}:
            total += value + len(others)
        case _:
            total += 99
    return total

## f-strings: table$[f"{name$}_{width$}"] + len(f"{slope$:.2f}")
name$, width$, slope$ = "near", 2, 0.5
table$ = {"near_2": 3, "near_3": 4, "far_2": 5}

## text: len("%s %d" % (name$, width$)) + len("{} {x}".format(width$, x=name$)) + int(number$)
name$, width$, number$ = "near", 2, "12"

## lookup by a number: table$[width$] + names$[name$]
table$, names$ = {1: 4, 2: 5, 3: 6}, {"a": 1, "b": 2}
width$, name$ = 2, "a"

## try: read$first() + read$second() + read$third()
conf$, sizes$ = {"b": 1}, [1]
class Cfg$:
    pass
cfg$ = Cfg$()
def read$first():
    try:
        return conf$["a"]
    except KeyError:
        return 3
def read$second():
    try:
        return cfg$.width
    except AttributeError as error:
        return 4 + len(error.args)
def read$third():
    try:
        return sizes$[2]
    except (IndexError, KeyError):
        return 5
    finally:
        conf$.get("b")

## environment: float(os.environ.get("FUZZED_WIDTH$", "3")) + len(os.getenv("FUZZED_NAME$", "near"))

## is in the environment: 3 if "FUZZED_FLAG$" in os.environ else 4

## environment with KeyError: read$env()
def read$env():
    try:
        return int(os.environ["FUZZED_SIZE$"])
    except KeyError:
        return 4

## wraps: scaled$(2)
def times$(factor):
    def wrap(f):
        @functools.wraps(f)
        def wrapped(*args, **kwargs):
            return f(*args, **kwargs) * factor
        return wrapped
    return wrap
@times$(3)
def scaled$(x):
    return x + shift$
shift$ = 1

## lru_cache: square$(width$)
width$ = 3
@functools.lru_cache(maxsize=None)
def square$(n):
    return n * n

## cached property: cfg$.size
class Cfg$:
    width = 3
    @functools.cached_property
    def size(self):
        return self.width + 1
cfg$ = Cfg$()

## reduce: functools.reduce(lambda x, y: x * factor$ + y, sizes$, start$)
sizes$, factor$, start$ = [1, 2, 3], 2, 1

## map, filter, zip: sum(map(double$, filter(keep$, sizes$))) + sum(x * y for x, y in zip(sizes$, reversed(sizes$)))
sizes$, factor$, low$ = [1, 2, 3], 2, 1
def double$(x):
    return x * factor$
def keep$(x):
    return x > low$

## sorted and max with a key: sorted(names$, key=lambda n: table$[n])[0] * 2 + max(names$, key=table$.get) + min(names$)
names$, table$ = [1, 2, 3], {1: 5, 2: 3, 3: 4}

## sorted objects: sorted(cfgs$)[0].n + max(cfgs$).n
class Cfg$:
    sign = 1
    def __init__(self, n):
        self.n = n
    def __lt__(self, other):
        return self.n * self.sign < other.n * self.sign
    def __gt__(self, other):
        return self.n * self.sign > other.n * self.sign
cfgs$ = [Cfg$(3), Cfg$(1), Cfg$(2)]

## any and all: (1 if any(flags$) else 2) + (3 if all(x > 0 for x in sizes$) else 5)
flags$, sizes$ = [False, True], [1, 2]

## singledispatch: kind$(width$)
width$ = 3
@functools.singledispatch
def kind$(x):
    return 1
@kind$.register
def _(x: int):
    return x + 2
@kind$.register(float)
def _(x):
    return x + 3

## ChainMap: chain$["a"] + chain$["b"] + chain$.get("z", 3)
chain$ = collections.ChainMap({"a": 1}, {"a": 2, "b": 4})

## UserDict and UserList: conf$["a"] + conf$.get("z", 5) + sizes$[1] + len(sizes$)
conf$, sizes$ = collections.UserDict(a=1), collections.UserList([1, 2])

## deque: sizes$[0] + len(sizes$) + sum(sizes$)
sizes$ = collections.deque([1, 2, 3])

## OrderedDict: conf$["a"] * 2 + list(conf$.values())[0] + len(conf$)
conf$ = collections.OrderedDict(a=1, b=2)

## Counter and defaultdict: count$["a"] + count$["z"] + default$["a"] + default$.get("z", 2)
count$, default$ = collections.Counter(a=3), collections.defaultdict(int, a=4)

## SimpleNamespace: cfg$.width + cfg$.inner.step
cfg$ = types.SimpleNamespace(width=3, inner=types.SimpleNamespace(step=2))

## mappingproxy: view$["a"] + len(view$)
conf$ = {"a": 1}
view$ = types.MappingProxyType(conf$)

## classmethod and staticmethod: Cfg$.size() + Cfg$.fixed(2) + cfg$.size() + cfg$.fixed(1)
class Base$:
    width = 3
    @classmethod
    def size(cls):
        return cls.width
    @staticmethod
    def fixed(x):
        return x * shift$
class Cfg$(Base$):
    width = 4
shift$, cfg$ = 2, Cfg$()

## init_subclass: sum(c.width for c in Base$.known) + Base$.known[0].extra
class Base$:
    known = []
    extra = 1
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Base$.known.append(cls)
class One$(Base$):
    width = 3
class Two$(Base$):
    width = 4

## class_getitem: Cfg$[3]
class Cfg$:
    width = 2
    def __class_getitem__(cls, n):
        return cls.width * n

## ABC: cfg$.size() + (1 if isinstance(cfg$, Shape$) else 2)
class Shape$(abc.ABC):
    @abc.abstractmethod
    def size(self): ...
    @property
    def extra(self):
        return 1
class Square$(Shape$):
    side = 3
    def size(self):
        return self.side * self.side + self.extra
cfg$ = Square$()

## Protocol: (1 if isinstance(cfg$, Sized$) else 2) + cfg$.size()
@typing.runtime_checkable
class Sized$(typing.Protocol):
    def size(self): ...
class Cfg$:
    side = 3
    def size(self):
        return self.side
cfg$ = Cfg$()

## Generic: Box$[int](3).get() + box$.get()
T$ = typing.TypeVar("T$")
class Box$(typing.Generic[T$]):
    shift = 1
    def __init__(self, x):
        self.x = x
    def get(self):
        return self.x + self.shift
box$ = Box$(2)

## callables in a dict: table$[name$](2) + table$["plus"](1)
def plus$(x):
    return x + 1
table$ = {"times": lambda x: x * 3, "plus": plus$}
name$ = "times"

## stored method: cfg$.reader() + reader$()
class Cfg$:
    width = 3
    def __init__(self):
        self.reader = self.size
    def size(self):
        return self.width
cfg$ = Cfg$()
reader$ = Cfg$().size

## method set on an instance: cfg$.size()
class Cfg$:
    width = 3
    def size(self):
        return self.width
cfg$ = Cfg$()
cfg$.size = types.MethodType(lambda self: self.width * 2, cfg$)

## class in an attribute: cfg$.made(2).get()
class Made$:
    factor = 3
    def __init__(self, n):
        self.n = n
    def get(self):
        return self.n * self.factor
class Twice$(Made$):
    factor = 6
class Cfg$:
    made = Made$
cfg$ = Cfg$()

## new: Cfg$(2).width
class Cfg$:
    shift = 1
    def __new__(cls, n):
        made = super().__new__(cls)
        made.width = n + cls.shift
        return made

## weakref: ref$().width + cfg$.width
class Cfg$:
    def __init__(self):
        self.width = 3
cfg$ = Cfg$()
ref$ = weakref.ref(cfg$)

## attrgetter and itemgetter: width$(cfg$) + second$(sizes$) + called$(cfg$)
class Cfg$:
    width = 3
    def size(self, n):
        return self.width * n
cfg$, sizes$ = Cfg$(), [1, 2, 3]
width$, second$, called$ = operator.attrgetter("width"), operator.itemgetter(1), operator.methodcaller("size", 2)

## builtins: len(sizes$) + abs(low$) + max(sizes$) + sum(sizes$) + round(slope$) + int(slope$) + pow(2, width$)
sizes$, low$, slope$, width$ = [1, 2, 3], -4, 2.75, 3

## tensor: bias$ * 2 + 0 * q
bias$ = torch.tensor(1.5)

## table of a tensor: table$[q % 3] + table$.shape[0] + len(table$)
table$ = torch.tensor([1.0, 2.0, 4.0])

## tensors in containers: conf$["bias"] + rows$[1][0] + cfg$.inner["x"][k % 2]
class Cfg$:
    def __init__(self):
        self.inner = {"x": torch.tensor([0.5, 1.5])}
conf$, rows$, cfg$ = {"bias": torch.tensor(2.0)}, [torch.ones(1), torch.zeros(2)], Cfg$()

## dtype of a tensor: 1 if table$.dtype == torch.float32 else 2 if table$.is_floating_point() else 3
table$ = torch.tensor([1.0, 2.0])

## shape of a tensor: table$.numel() + table$.dim() + table$.shape[-1] + table$.size(0) - table$.requires_grad
table$ = torch.ones(2, 3)

## attribute of a tensor: table$.width + table$[0]
table$ = torch.ones(2)
table$.width = 3

## sum of a tensor: table$.sum() + table$.float().mean() + torch.where(table$ > 1, table$, shift$).amax()
table$, shift$ = torch.tensor([1.0, 2.0]), 3.0

## numpy scalars: wide$ + np32$ + (1 if isinstance(wide$, np.integer) else 2)
wide$, np32$ = np.int64(3), np.float32(0.5)

## name of a class: table$[type(cfg$).__name__[:3]] + len(Cfg$.__qualname__) + len(helper$.__name__)
class Cfg$:
    pass
def helper$(): ...
cfg$, table$ = Cfg$(), {"Cfg": 3, "Oth": 4}
class Other$:
    pass

## local functions: run$()
step$ = 2
def run$():
    total = 0
    def add(n):
        nonlocal total
        total += n * step$
        return total
    return add(1) + add(2) + (lambda x: x + step$)(3)

## recursion: depth$(tree$)
tree$ = {"value": 1, "next": {"value": 2, "next": None}}
def depth$(node):
    return 0 if node is None else node["value"] + depth$(node["next"]) * 2

## while: count$()
limit$, step$ = 6, 2
def count$():
    n = total = 0
    while (n := n + 1) < min(limit$, 30):
        total += step$
        if total > 20:
            break
    else:
        total += 1
    return total

## assert: checked$()
width$, names$ = 3, ["a", "b"]
def checked$():
    assert width$, "needs a width"
    assert isinstance(names$, list)
    return width$ or len(names$)

## math: math.floor(slope$) + math.sqrt(width$) + math.pi * 0 + math.isfinite(slope$) + math.gcd(width$, 4)
slope$, width$ = 2.5, 4

## finfo: 1 if torch.finfo(dtype$).bits == 32 else 2
dtype$ = torch.float32

## Fraction: float(part$) + part$.numerator
part$ = fractions.Fraction(1, 4)

## itertools: sum(itertools.chain(sizes$, more$)) + list(itertools.accumulate(sizes$))[-1]
sizes$, more$ = [1, 2], (3,)

## contextvar: var$.get()
var$ = contextvars.ContextVar("var$", default=3)

## thread local: local$.width
local$ = threading.local()
local$.width = 3

## iterator: sum(Count$(3)) + next(iter(Count$(2)))
class Count$:
    step = 1
    def __init__(self, n):
        self.n = n
    def __iter__(self):
        return self
    def __next__(self):
        if self.n <= 0:
            raise StopIteration
        self.n -= 1
        return self.n * self.step

## global of this module: sys.modules[__name__].width$ if False else width$
width$ = 3

## module getattr: mod$.width + mod$.other
mod$ = types.ModuleType("made$")
mod$.width = 3
mod$.__getattr__ = lambda name: len(name)

## is: (1 if cfg$ is chosen$ else 2) + (3 if kind$ is Cfg$ else 5) + (1 if f$ is g$ else 4)
class Cfg$:
    pass
class Other$:
    pass
def f$(): ...
def g$(): ...
cfg$ = chosen$ = Cfg$()
kind$ = Cfg$

## same object twice: pair$[0].width + pair$[1].width * 2
class Cfg$:
    def __init__(self):
        self.width = 3
first$ = Cfg$()
pair$ = [first$, first$]

## exception of the user: run$()
class Bad$(Exception):
    code = 4
class Worse$(Bad$):
    code = 5
width$, kind$ = 3, Worse$
def run$():
    try:
        if width$ < 5:
            raise kind$(width$)
    except Bad$ as error:
        return error.code + error.args[0]
    return 1

## setattr on a new object: build$().total
width$ = 3
class Cfg$:
    shift = 1
    def __setattr__(self, name, value):
        object.__setattr__(self, name, value + type(self).shift)
def build$():
    made = Cfg$()
    made.total = width$
    return made

## slices of objects: box$[1:3] + box$[0]
class Box$:
    items = [1, 2, 3, 4]
    def __getitem__(self, i):
        return sum(self.items[i]) if isinstance(i, slice) else self.items[i]
box$ = Box$()

## copy: copy.copy(cfg$).width
class Cfg$:
    def __init__(self):
        self.width = 3
cfg$ = Cfg$()

## replace: dataclasses.replace(cfg$, step=2).width + cfg$.step
@dataclasses.dataclass
class Cfg$:
    width: int = 3
    step: int = 1
cfg$ = Cfg$()

## methods of str: len(name$.upper() + number$) + len(name$.split("e"))
name$, number$ = "near", "12"

## regex: len(re.sub("[ae]", "", name$))
name$ = "near"

## string key of a type: table$[type(width$)] + table$[cfg$.__class__]
class Cfg$:
    pass
class Other$:
    pass
cfg$, width$ = Cfg$(), 3
table$ = {int: 1, float: 2, bool: 3, Cfg$: 4, Other$: 5}
"""
