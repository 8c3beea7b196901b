"""Compare your own code with eager: `assert_matches_eager`, and hypothesis strategies to feed it.

    from graphify.testing import Call, assert_matches_eager

    def test_decode_is_eager_in_all_but_speed():
        calls = [Call((torch.randn(4, 16),)) for _ in range(5)]
        stats = assert_matches_eager(Decoder(), calls)      # backend="tape": no GPU needed
        assert stats.replays == 3

With hypothesis installed, `tensors()` and `pytrees()` draw arguments of all layouts and containers, `programs()` draws
small random programs and `call_sequences(program)` calls for one; graphify's own property tests are

    @given(st.data())
    def test_random_programs(data):
        program = data.draw(programs())
        calls = data.draw(call_sequences(program))
        assert_matches_eager(make=program.make, calls=calls, loud_ok=True)

`programs(trained=True)` and `training_sequences(program)` draw programs with weights, and calls with the backwards and
steps of training after them: `Then` with acts such as `Backward` and `Update`, which fit calls of your own as well.
"""

from ._acts import (
    Backward as Backward,
    Drop as Drop,
    Edit as Edit,
    EditArguments as EditArguments,
    Gradients as Gradients,
    HoldGradients as HoldGradients,
    Hook as Hook,
    SetGradients as SetGradients,
    Update as Update,
    ZeroGradients as ZeroGradients,
)
from ._changes import Changes as Changes
from ._data import Data as Data, Rows as Rows, Scaled as Scaled, make_tensor as make_tensor
from ._grammar import programs as programs
from ._matching import assert_matches_eager as assert_matches_eager
from ._programs import Input as Input, Program as Program, State as State
from ._sequences import (
    Ambient as Ambient,
    Latest as Latest,
    Spoil as Spoil,
    call_sequences as call_sequences,
)
from ._strategies import Pair as Pair, Record as Record, pytrees as pytrees, tensors as tensors
from ._training import training_sequences as training_sequences
from ._twins import Act as Act, Call as Call, Then as Then
from ._worlds import Late as Late

__all__ = [
    "Act",
    "Ambient",
    "Backward",
    "Call",
    "Changes",
    "Data",
    "Drop",
    "Edit",
    "EditArguments",
    "Gradients",
    "HoldGradients",
    "Hook",
    "Input",
    "Late",
    "Latest",
    "Pair",
    "Program",
    "Record",
    "Rows",
    "Scaled",
    "SetGradients",
    "Spoil",
    "State",
    "Then",
    "Update",
    "ZeroGradients",
    "assert_matches_eager",
    "call_sequences",
    "make_tensor",
    "programs",
    "pytrees",
    "tensors",
    "training_sequences",
]
