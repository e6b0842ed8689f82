"""Functions that use what Python has, for test_follow: each is run by Python and by the interpreter of bytecode."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import math
import operator


class Cfg:
    def __init__(self, w):
        self.window = w

    @property
    def double(self):
        return self.window * 2

    def grow(self, n=1, *, k=2):
        return self.window + n * k

    def __getitem__(self, i):
        return self.window + i

    def __add__(self, o):
        return self.window + (o.window if isinstance(o, Cfg) else o)

    def __radd__(self, o):
        return o - self.window

    def __eq__(self, o):
        return isinstance(o, Cfg) and self.window == o.window

    def __hash__(self):
        return 1

    def __len__(self):
        return 3

    def __contains__(self, x):
        return x == self.window

    def __call__(self, x):
        return x * self.window

    def __enter__(self):
        return self.window

    def __exit__(self, *e):
        return True

    def __iter__(self):
        return iter([1, 2, self.window])

    def __format__(self, s):
        return f"<{s}{self.window}>"

    def __repr__(self):
        return f"Cfg({self.window})"

    def __lt__(self, o):
        return self.window < o.window


class Sub(Cfg):
    extra = 7

    def grow(self, n=1, **kw):
        return super().grow(n, **kw) + self.extra

    @classmethod
    def make(cls):
        return cls(5)

    @staticmethod
    def st(x):
        return x + 1


class Meta(type):
    @property
    def gain(cls):
        return 4

    def __call__(cls, *a):
        o = super().__call__(*a)
        o.tag = 1
        return o


class WithMeta(metaclass=Meta):
    def __init__(self, x):
        self.x = x


class Desc:
    def __get__(self, o, t):
        return 11 if o is None else o.x + 1

    def __set__(self, o, v):
        o.__dict__["x"] = v


class HasDesc:
    d = Desc()

    def __init__(self):
        self.x = 3


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = 1


class Dyn:
    def __getattr__(self, n):
        if n == "nope":
            raise AttributeError(n)
        return len(n)


class DynAll:
    def __getattribute__(self, n):
        return n if n[0] != "_" else object.__getattribute__(self, n)


@dataclasses.dataclass
class DC:
    x: int = 3
    y: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class FDC:
    x: int = 3


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Num(enum.IntEnum):
    ONE = 1
    TWO = 2


NT = collections.namedtuple("NT", "p q")


class D(dict):
    def __missing__(self, k):
        return k * 2


class L(list):
    def first(self):
        return self[0]


class I(int):
    pass


cfg = Cfg(3)
sub = Sub(4)
G = 10
lst = [1, 2.5, "a", (3, 4)]
dct = {"a": 1, "b": [1, 2], 3: None}
big = list(range(100))
st = {1, 2, 3}
D1 = D(a=5)
L1 = L([9, 8])
I1 = I(6)
slotted = Slotted()
hd = HasDesc()
wm = WithMeta(2)
dc = DC()
fdc = FDC()
nt = NT(1, 2)
part = functools.partial(lambda a, b, c=2: a * b + c, 3)


def gen(n):
    for i in range(n):
        got = yield i * G
        if got:
            yield got


def gen2():
    r = yield from gen(2)
    yield 99
    return 3


@contextlib.contextmanager
def cm(v):
    try:
        yield v + 1
    finally:
        pass


def f1(x):
    return cfg.window + cfg.double + cfg.grow() + cfg.grow(2, k=5) + cfg[4] + len(cfg) + cfg(x)


def f2(x):
    return [cfg + 1, 1 + cfg, cfg + cfg, cfg == Cfg(3), cfg != 4, 3 in cfg, 4 in cfg, cfg is cfg, cfg < sub]


def f3(x):
    return sub.grow(), sub.grow(3, k=1), Sub.make().window, Sub.st(2), sub.st(5), Sub.extra, sub.extra


def f4(x):
    return WithMeta.gain, wm.tag, WithMeta(3).tag, WithMeta(3).x


def f5(x):
    hd.__class__
    return hd.d, HasDesc.d


def f6(x):
    try:
        slotted.b
    except AttributeError:
        r = "none"
    return slotted.a, r, hasattr(slotted, "b"), getattr(slotted, "b", 5)


def f7(x):
    d = Dyn()
    return d.abc, hasattr(d, "nope"), DynAll().foo, getattr(d, "nope", 1)


def f8(x):
    return dc.x, DC(5).x, DC() == DC(), fdc.x, dataclasses.replace(fdc, x=9).x, repr(FDC(2)), hash(1)


def f9(x):
    return (
        Color.RED is Color.RED,
        Color.RED.value,
        Color.BLUE.name,
        Color(2).name,
        Num.ONE + 1,
        Num.TWO > 1,
        [c.name for c in Color],
        Color["RED"].value,
    )


def f10(x):
    return nt.p + nt.q, nt[0], nt._replace(p=4), NT(5, 6).q, [*nt], NT._fields


def f11(x):
    return (
        D1["a"],
        D1["zz"],
        D1.get("q", 4),
        "a" in D1,
        len(D1),
        list(D1.items()),
        L1.first(),
        L1[1],
        [*L1],
        len(L1),
        I1 + 1,
        I1 * 2,
    )


def f12(x):
    return (
        lst[1],
        lst[-1][0],
        lst[1:3],
        len(lst),
        [type(v).__name__ for v in lst],
        2.5 in lst,
        lst + [1],
        dct["a"],
        dct.get("zz"),
        sorted(dct["b"], reverse=True),
        list(dct),
        {**dct, "n": 1},
        (dct | {"q": 2})["q"],
    )


def f13(x):
    t = 0
    for i, v in enumerate(big):
        if i % 2:
            continue
        if i > 50:
            break
        t += v
    else:
        t = -1
    return (
        t,
        sum(big),
        max(big),
        min(3, G),
        any(v > 98 for v in big),
        all(big),
        [a * b for a, b in zip(big[:3], [1, 2, 3])],
    )


def f14(x):
    return list(gen(3)), list(gen2()), sum(gen(4)), [*gen(2)], next(gen(1)), tuple(a + 1 for a in gen(2))


def f15(x):
    with cfg as w:
        y = w + 1
    with cm(4) as z:
        pass
    with cfg:
        raise ValueError("swallowed")
    return y, z


def f16(x):
    out = []
    try:
        try:
            raise KeyError("k")
        except (ValueError, KeyError) as e:
            out.append(str(e))
            raise RuntimeError("r") from e
        finally:
            out.append("fin")
    except RuntimeError as e:
        out.append(type(e.__cause__).__name__)
    try:
        {}["q"]
    except KeyError:
        out.append("ke")
    try:
        int("x")
    except ValueError as e:
        out.append(str(e))
    try:
        undefined_name
    except NameError:
        out.append("ne")
    try:
        [][1]
    except IndexError:
        out.append("ie")
    try:
        nope.x
    except NameError:
        out.append("nn")
    return out


def f17(x):
    return (
        f"{G}{x!r:>5}{cfg:ab}{3.14159:.2f}{lst}{cfg}",
        "%d-%s" % (G, "z"),
        f"{G} {2}",
        str(G),
        repr(cfg),
        str(cfg),
        ",".join(str(i) for i in range(3)),
    )


def f18(x):
    match x:
        case 3:
            return "three"
        case int(y) if y > 100:
            return "big"
        case [a, b, *c]:
            return a, b, c
        case {"k": v, **rest}:
            return v, rest
        case Cfg(window=w):
            return w
        case "s" | "t":
            return "str"
        case None:
            return "none"
        case _:
            return "other"


def f19(x):
    return (
        functools.reduce(operator.add, [1, 2, G]),
        list(map(lambda v: v + G, big[:3])),
        list(filter(None, [0, 1, 2])),
        sorted(lst[:2], key=lambda v: -v),
        part(4),
        part(4, c=1),
        operator.itemgetter(1)(lst) if False else 0,
        list(itertools.chain([1], big[:2])),
        list(itertools.product([1, 2], "ab")),
        math.gcd(12, G),
        math.pi,
        divmod(G, 3),
        pow(G, 2),
        round(2.567, 1),
        abs(-G),
        int("12"),
        float(G),
        bool(lst),
        isinstance(G, int),
        type(G) is int,
        float is float,
        isinstance(cfg, (Cfg, int)),
        callable(cfg),
        issubclass(Sub, Cfg),
    )


def f20(x):
    def inner(a, *args, k=G, **kw):
        nonlocal_v = a + len(args) + k + len(kw)

        def deeper():
            return nonlocal_v + x0

        return deeper()

    x0 = 100
    counter = 0

    def bump():
        nonlocal counter
        counter += 1
        return counter

    bump()
    bump()
    a, (b, c), *d = 1, (2, 3), 4, 5
    e = [i for i in range(5) if i % 2] + [*range(2)]
    s = {i % 3 for i in range(7)}
    m = {i: i * i for i in range(3)}
    lam = [lambda i=i: i + x0 for i in range(3)]
    m["z"] = 1
    del m[0]
    e[0] = 9
    e[1:2] = [7, 7]
    del e[-1]
    x = y = 3
    x += 2
    y **= 2
    z = x if y else 0
    w = not z
    v = (x and y) or z
    u = 1 < x < 10
    return (
        inner(1),
        inner(1, 2, 3, k=1, q=2),
        counter,
        a,
        b,
        c,
        d,
        e,
        s,
        m,
        [g() for g in lam],
        x,
        y,
        z,
        w,
        v,
        u,
        -x,
        ~x,
        +x,
        x << 2,
        x >> 1,
        x & 1,
        x | 8,
        x ^ 3,
        x @ 1 if False else 0,
        x // 2,
        x % 2,
        x / 2,
    )


def f21(x):
    i = 0
    while True:
        i += 1
        if i == 3:
            continue
        if i > 5:
            break
    o = Cfg(1)
    o.window = 5
    o.other = [1]
    o.other.append(2)
    del o.other
    try:
        o.other
    except AttributeError:
        z = 1
    assert i == 6, "x"
    return (
        i,
        o.window,
        z,
        id(o) == id(o) if False else 0,
        st | {4},
        st & {1},
        1 in st,
        len(st),
        sorted(st),
        frozenset([1]) <= st,
        "abc"[1],
        "abc"[::-1],
        b"ab"[0],
        range(5)[2],
        (1, 2) < (1, 3),
        [1] == [1],
        (1, "a") == (1, "a"),
        None is None,
        "x" not in "abc",
        lst is not dct,
    )


def f22(x):
    import math as m
    import os.path
    from collections import OrderedDict

    od = OrderedDict(a=1)
    return m.sqrt(4), od["a"], os.path.join("a", "b"), x if x is not None else 1


@functools.lru_cache
def cached(x):
    return x + G


@functools.wraps(f1)
def wrapped(*a, **k):
    return f1(*a, **k)


def f23(x):
    return (
        cached(3),
        wrapped(x),
        f1.__name__,
        wrapped.__wrapped__(x),
        cfg.__class__.__name__,
        type(cfg).__mro__[0] is Cfg,
        vars(cfg)["window"],
        cfg.__dict__,
        Sub.__bases__[0] is Cfg,
    )


def f24(x):
    try:
        for i in [3, 2, 1, 0]:
            try:
                1 // i
            except ZeroDivisionError:
                return "zde", i
            finally:
                q = i
    finally:
        q = 100


def f25(x):
    r = []
    for v in cfg:
        r.append(v)
    a, b, c = cfg
    g = (y for y in [1, 2])
    r += [a, b, c]
    r.extend(g)
    d = dict(zip("ab", [1, 2]))
    d.update(c=3)
    d.setdefault("d", []).append(1)
    e = collections.defaultdict(int)
    e["x"] += 1
    return (
        r,
        d,
        dict(e),
        collections.Counter("aab")["a"],
        [*reversed([1, 2])],
        list(itertools.islice(itertools.count(3), 2)),
        list(itertools.accumulate([1, 2, 3])),
        ["a", "b"],
        "ab".upper(),
        [1, 2].index(2),
        (1, 2, 1).count(1),
        dict.fromkeys("ab", 0),
        int.from_bytes(b"a", "big"),
        (5).bit_length(),
    )


CASES = [
    (f, a)
    for f in [
        f1,
        f2,
        f3,
        f4,
        f5,
        f6,
        f7,
        f8,
        f9,
        f10,
        f11,
        f12,
        f13,
        f14,
        f15,
        f16,
        f17,
        f19,
        f20,
        f21,
        f22,
        f23,
        f24,
        f25,
    ]
    for a in (3,)
] + [(f18, a) for a in (3, 200, [1, 2, 3, 4], {"k": 1, "z": 2}, Cfg(8), "t", None, 2.5)]
