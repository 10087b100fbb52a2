from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from reference.taps import Recorder, imposed, listening, name_modules, recording, tap


class Module:
    def __init__(self, **children):
        self.children = children

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, child in self.children.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)


def test_names_are_paths_and_values_pass_through():
    leaf = Module()
    name_modules(Module(layers=Module(first=leaf)))
    value = object()
    with recording(Recorder({"layers.first.choice": 7})) as recorder:
        assert tap(leaf, "gate", value) is value
        assert imposed(leaf, "choice") == 7 and imposed(leaf, "gate") is None
        assert listening()
    assert recorder.values == {"layers.first.gate": value}


def test_without_a_recorder_nothing_happens():
    leaf = Module()
    assert not listening() and tap(leaf, "gate", 1) == 1 and imposed(leaf, "gate") is None


def test_the_innermost_recorder_listens_and_the_outer_one_comes_back():
    leaf = Module()
    with recording(Recorder()) as outer:
        with recording(Recorder()) as inner:
            tap(leaf, "gate", 1)
        tap(leaf, "gate", 2)
    assert inner.values == {"gate": 1} and outer.values == {"gate": 2}


def test_a_recorder_hears_its_own_thread_alone():
    leaf = Module()
    name_modules(Module(layers=leaf))
    with ThreadPoolExecutor(1) as pool, recording(Recorder()) as recorder:
        tap(leaf, "gate", 1)
        pool.submit(tap, leaf, "gate", 2).result()
        assert listening() and not pool.submit(listening).result()
    assert recorder.values == {"layers.gate": 1}
