from t2n_hf.export.nesting import nested
from t2n_hf.nnef.ir import Assign, Call, Name


def unsqueeze(result, source):
    return Assign((result,), "unsqueeze", (Name(source),), {"axes": [0]})


def product(result, *factors):
    return Assign((result,), "matmul", tuple(Name(factor) for factor in factors))


WRITTEN = Call("unsqueeze", (Name("w"),), {"axes": [0]})


def test_a_weights_change_of_rank_is_written_where_it_is_used_and_leaves_its_name():
    body = [unsqueeze("q", "w"), product("q_1", "x", "q"), product("y", "q_1", "q_1")]
    assert nested(body, {"w"}, ["y"]) == (
        Assign(("q",), "matmul", (Name("x"), WRITTEN)),
        product("y", "q", "q"),
    )


def test_a_result_keeps_its_name():
    body = [unsqueeze("q", "w"), product("q_1", "x", "q")]
    assert nested(body, {"w"}, ["q_1"]) == (Assign(("q_1",), "matmul", (Name("x"), WRITTEN)),)


def test_a_value_with_another_name_keeps_it():
    body = [unsqueeze("q", "w"), product("z", "x", "q"), product("y", "z", "x")]
    assert nested(body, {"w"}, ["y"])[0].results == ("z",)


def test_names_in_lists_are_uses_too():
    joined = Assign(("y",), "concat", ([Name("q"), Name("x")],), {"axis": 0})
    assert nested([unsqueeze("q", "w"), joined], {"w"}, ["y"])[0].args == ([WRITTEN, Name("x")],)


def test_what_is_used_twice_or_not_at_all_or_is_a_result_or_is_no_weight_stays():
    for body, kept in (
        ([unsqueeze("q", "w"), product("y", "q", "q")], ["y"]),
        ([unsqueeze("q", "w"), product("y", "x", "x")], ["y"]),
        ([unsqueeze("q", "w"), product("y", "x", "q")], ["y", "q"]),
        ([unsqueeze("q", "x"), product("y", "x", "q")], ["y"]),
    ):
        assert nested(body, {"w"}, kept) == tuple(body)
