"""KeyboardInterrupts at every point of some code at which CPython 3.11 looks for signals, one after the other."""

import dis
import sys

import pytest

needs_known_points = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="where CPython looks for signals differs by version"
)


class Interrupts:
    """Raises KeyboardInterrupt at the n-th point, counted in files whose paths begin with one of `places`."""

    LOOKS = ("RESUME", "JUMP_BACKWARD", "CALL", "CALL_FUNCTION_EX")

    def __init__(self, at, places):
        self.left, self.places = at, places
        self.returned, self.where = False, None

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(self.places):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        names, last = {i.offset: i.opname for i in dis.get_instructions(frame.f_code)}, "RESUME"

        def local(frame, event, _):
            nonlocal last
            if event == "opcode":
                # Python functions are called without a look afterwards.
                looks = last in self.LOOKS and not (self.returned and last == "CALL")
                self.returned, last = False, names.get(frame.f_lasti)
                if looks and self.where is None:
                    self.left -= 1
                    if not self.left:
                        self.where = (frame.f_code.co_name, frame.f_lineno)
                        raise KeyboardInterrupt
            elif event == "return":
                self.returned = True
            return local

        return local


def interrupted(function, at, *places):
    """Run `function` with an interrupt at its `at`-th point in `places`; say where that was, None: it has no more."""
    interrupts, before = Interrupts(at, places), sys.gettrace()
    sys.settrace(interrupts)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupts.where
