"""Step 0: tensors as bytes that are checked: nothing that was changed, cut short or made by a stranger is taken."""

import hashlib
import io
import json
import os
import pickle
import tracemalloc

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from step0_monolith.payload import KIND, VERSION, PayloadError, is_scalar, pack, pack_into, unpack

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def many_tensors():
    generator = torch.Generator().manual_seed(0)
    found = {f"f/{dtype}": torch.randn(3, 5, generator=generator).to(dtype) for dtype in FLOATS}
    found |= {f"i/{dtype}": torch.randint(0, 100, (7,), generator=generator).to(dtype) for dtype in INTEGERS}
    found |= {"bool": torch.tensor([True, False, True]), "0-dim": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    found |= {"odd": torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 5e-324], dtype=torch.float64)}
    found |= {'a name "sha256":"with quotes, ü and \\': torch.arange(4.0)}
    return found | {"transposed": torch.randn(4, 3, generator=generator).t(), "columns": torch.randn(4, 6)[:, ::2]}


SCALARS = {"none": None, "yes": True, "int": 2**70, "float": 0.1 + 0.2, "text": 'ü "sha256":"x" \n', "list": [1, [2.5]]}


def small_payload() -> bytes:
    return pack({"0.weight": torch.tensor([1.0, 2.0]), "1.bias": torch.tensor([True])}, {"updates": 3})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def forged(header: dict, body: bytes = b"", **about: object) -> bytes:
    """A payload as somebody might make it who knows how: whatever its header says, its checksum is right."""
    about = {"format": "pt", "kind": KIND, "version": VERSION, "sha256": "0" * 64, "scalars": "{}", **about}
    text = json.dumps({"__metadata__": about, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return with_checksum(len(text).to_bytes(8, "little") + text + body)


def with_checksum(data: bytes) -> bytes:
    place = data.index(b'"sha256":"') + len(b'"sha256":"')
    data = data[:place] + b"0" * 64 + data[place + 64 :]
    return data[:place] + hashlib.sha256(data).hexdigest().encode() + data[place + 64 :]


def refused(data: bytes) -> str:
    """The reason for which bytes are refused: one line, and no other error than the one for this."""
    with pytest.raises(PayloadError) as caught:
        unpack(data)
    reason = str(caught.value)
    assert reason.startswith("the payload ")
    assert "\n" not in reason
    return reason


def test_every_type_comes_back_with_its_bits():
    tensors = many_tensors()
    data = pack(tensors, SCALARS)
    found = unpack(data)
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found.tensors[name].dtype, found.tensors[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found.tensors[name]) == bits(tensor), name
    assert found.scalars == SCALARS
    assert type(found.scalars["yes"]) is bool
    assert found.sha256.encode() in data
    assert with_checksum(data) == data


def test_a_file_holds_what_the_bytes_do(tmp_path):
    tensors = many_tensors()
    for path in (tmp_path / "a.safetensors", tmp_path / "ü b"):
        digest = pack_into(path, tensors, SCALARS)
        found = unpack(path.read_bytes())
        assert {n: bits(x) for n, x in found.tensors.items()} == {n: bits(x) for n, x in tensors.items()}
        assert (found.scalars, found.sha256) == (SCALARS, digest)
        assert with_checksum(path.read_bytes()) == path.read_bytes()
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(FileNotFoundError):
        pack_into(tmp_path / "absent" / "a", tensors, SCALARS)
    with pytest.raises(IsADirectoryError):
        pack_into(tmp_path, tensors, SCALARS)
    with pytest.raises(ValueError):
        pack_into(tmp_path / "b", tensors, {"x": float("nan")})
    assert not (tmp_path / "b").exists()


def test_a_file_larger_than_what_is_read_at_once(tmp_path):
    tensors = {"x": torch.arange(700_001, dtype=torch.float64)}
    pack_into(tmp_path / "a", tensors, {})
    assert torch.equal(unpack((tmp_path / "a").read_bytes()).tensors["x"], tensors["x"])


def test_nothing_at_all_is_a_payload_too():
    assert unpack(pack({}, {}))[:2] == ({}, {})


def test_the_safetensors_library_reads_it(tmp_path):
    tensors = many_tensors()
    (tmp_path / "a.safetensors").write_bytes(pack(tensors, SCALARS))
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert {name: bits(x) for name, x in found.items()} == {name: bits(x) for name, x in tensors.items()}
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert json.loads(file.metadata()["scalars"]) == SCALARS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), torch.ones(1), {1, 2}], ids=repr)
def test_what_json_cannot_hold_is_refused_when_packed(value):
    with pytest.raises((ValueError, TypeError)):
        pack({}, {"x": value})
    assert not is_scalar(value)
    assert not is_scalar([1, [value]])


def test_what_a_scalar_is():
    assert all(map(is_scalar, [*SCALARS.values(), (0.9, 0.999)]))


def test_every_flipped_byte_is_refused():
    data = bytearray(small_payload())
    for place in range(len(data)):
        for mask in (0x01, 0x20, 0x80, 0xFF):
            data[place] ^= mask
            refused(bytes(data))
            data[place] ^= mask
    assert unpack(bytes(data)).scalars == {"updates": 3}


def test_every_truncation_is_refused():
    data = small_payload()
    reasons = [refused(data[:size]) for size in range(len(data))]
    header = 8 + int.from_bytes(data[:8], "little")
    assert f"the payload is cut short: {header} bytes, and its header promises {len(data)}" in reasons
    assert all("is cut short" in reason for reason in reasons[10:])
    assert reasons[0] == "the payload is no safetensors file (0 bytes)"


@pytest.mark.parametrize("more", [b"\0", b"x" * 100, small_payload()], ids=["one", "many", "another"])
def test_appended_bytes_are_refused(more):
    assert "is too long" in refused(small_payload() + more)


def test_a_flipped_byte_of_a_tensor_is_named_as_damage():
    data = bytearray(small_payload())
    data[-1] ^= 1
    assert refused(bytes(data)) == "the payload is damaged: its checksum does not match its bytes"
    with pytest.raises(PayloadError, match=r"^'x\.safetensors' is damaged"):
        unpack(bytes(data), "'x.safetensors'")


def test_a_foreign_safetensors_file_is_refused():
    for about in (None, {"format": "pt"}, {"kind": "another course"}):
        assert "not one of this course" in refused(safetensors.torch.save({"x": torch.ones(3)}, about))


def test_another_version_is_refused():
    assert refused(forged({}, version="2")) == "the payload has version '2'; this program reads version 1"
    assert "version None" in refused(forged({}, version=None))


def test_without_a_checksum_it_is_refused():
    data = forged({})
    digest = unpack(data).sha256.encode()
    for other in (b"0" * 64, digest[:-1] + b"g", digest.upper(), b"g" * 64):
        assert "checksum" in refused(data.replace(digest, other))
    assert "checksum" in refused(forged({}).replace(b'"sha256"', b'"sha257"'))


class Hostile:
    """What a pickle of it does when it is loaded: makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_pickle_runs(tmp_path):
    made = tmp_path / "made"
    saved = io.BytesIO()
    torch.save({"weight": torch.ones(2), "hostile": Hostile(made)}, saved)
    attacks = [pickle.dumps(Hostile(made), protocol) for protocol in range(6)] + [saved.getvalue()]
    inside = forged({}, scalars=json.dumps({"updates": pickle.dumps(Hostile(made), 0).decode()}))
    tensor = torch.frombuffer(bytearray(attacks[0]), dtype=torch.uint8)
    for data in attacks:
        assert "is no safetensors file" in refused(data)
        # A pickle that starts as a header does.
        assert "no safetensors file" in refused((len(data) - 8).to_bytes(8, "little") + b"{" + data)
    assert unpack(inside).scalars
    assert unpack(pack({"x": tensor}, {})).tensors
    assert not made.exists()
    pickle.loads(attacks[0])  # the attack is real
    assert made.exists()


def test_a_file_of_torch_save_is_refused():
    saved = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, saved)
    assert refused(saved.getvalue()) == f"the payload is no safetensors file ({len(saved.getvalue())} bytes)"


def entry(dtype: object, shape: object, offsets: object) -> dict:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HUGE = [
    entry("F32", [2**40], [0, 2**42]),
    entry("F32", [2**40], [0, 4]),
    entry("F32", [2**62], [0, 0]),
    entry("F32", [2**63, 0], [0, 0]),
    entry("F32", [2**64 - 1, 0], [0, 0]),
    entry("F32", [2**64], [0, 0]),
    entry("F32", [2**40, 2**40, 0], [0, 0]),
    entry("F32", [10**400], [0, 10**400]),
    entry("F32", [-1], [0, 0]),
    entry("F32", [1], [-4, 0]),
    entry("F32", [1], [2**63, 2**63]),
    entry("F32", [1], [4, 8]),
    entry("F32", [1.0], [0, 4]),
    entry("F32", [1], [0, 4.0]),
    entry("F32", [1], ["0", "4"]),
    entry("F32", [1], [None, None]),
    entry("F32", [1], 4),
    entry("F32", [1], []),
    entry("F32", "x", [0, 4]),
    entry("F32", [[1]], [0, 4]),
    entry("F99", [1], [0, 4]),
    entry("F64", [1], [0, 4]),
    entry("F8_E8M0", [4], [0, 4]),
    entry("F4", [8], [0, 4]),
    entry(None, [1], [0, 4]),
    {"x": None},
    {"x": [1, 2]},
    {"x": {}},
    {"x": "text"},
    {**entry("F32", [1], [0, 4]), "y": entry("F32", [1], [0, 4])["x"]},
]


@pytest.mark.parametrize("header", HUGE, ids=lambda h: str(h)[:70])
def test_claims_that_are_not_true_are_refused_though_the_checksum_is_right(header):
    tracemalloc.start()
    try:
        for size in (0, 4):
            refused(forged(header, b"\0" * size))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_forged_payload_that_is_right_is_taken():
    """Else the refusals above would show nothing."""
    found = unpack(forged(entry("F32", [1], [0, 4]), b"\0\0\x80\x3f", scalars='{"updates": 3}'))
    assert found.tensors["x"].tolist() == [1.0]
    assert found.scalars == {"updates": 3}


@pytest.mark.parametrize(
    "scalars", ["[]", "3", "null", "{", "", "[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}", None, {}, 3],
    ids=lambda s: str(s)[:10],
)  # fmt: skip
def test_scalars_that_cannot_be_read_are_refused(scalars):
    refused(forged({}, scalars=scalars))


def test_a_header_without_scalars_is_refused():
    data = forged({}).replace(b'"scalars"', b'"scalarz"')
    assert "cannot be read" in refused(with_checksum(data))


def test_a_header_that_is_too_long_or_too_deep_is_refused():
    for size in (2**64 - 1, 2**63, 100_000_001, 10**12):
        assert "is no safetensors file" in refused(size.to_bytes(8, "little") + b"{" + b" " * 100)
    assert "its header alone has 99999008" in refused((99_999_000).to_bytes(8, "little") + b"{}" + b" " * 100)
    for deep in (b'{"a":' + b"[" * 200_000, b'{"a":' * 200_000, b'{"a":' * 200_000 + b"1" + b"}" * 200_000):
        assert "its header cannot be read" in refused(len(deep).to_bytes(8, "little") + deep)
    for text in (b"[]", b"{]", b'{"\xff":1}', b"{NaN}", b'{"x":NaN}', b'{"__metadata__":3}', b'{"__metadata__":[]}'):
        refused(len(text).to_bytes(8, "little") + text)


@settings(max_examples=60, deadline=None, database=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    refused(data)
    refused(len(data).to_bytes(8, "little") + data)
    refused((len(data) + 1).to_bytes(8, "little") + b"{" + data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.integers(-2, 9) | st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64 - 1, 10**30])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "BOOL", "I64", "F8_E4M3", "C64"]) | JSON,
        "shape": st.lists(NUMBERS, max_size=4) | JSON,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | JSON,
    }
)


@settings(max_examples=60, deadline=None, database=None)
@given(st.dictionaries(st.text(max_size=3), ENTRIES | JSON, max_size=2), st.binary(max_size=9), JSON)
def test_whatever_is_forged_ends_in_a_payload_or_in_a_refusal(header, body, scalars):
    about = {"scalars": json.dumps(scalars)} if not isinstance(scalars, str) else {"scalars": scalars}
    data = forged({name: value for name, value in header.items() if name != "__metadata__"}, body, **about)
    try:
        found = unpack(data)
    except PayloadError:
        refused(data)
    else:
        assert sum(x.nbytes for x in found.tensors.values()) <= len(body)
        assert isinstance(found.scalars, dict)


SAMPLES = [torch.ones(2), torch.zeros(0), torch.tensor(3), torch.arange(6).view(2, 3), torch.ones(2).bfloat16()]
NAMES = st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__")
PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(-1e300, 1e300)


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.dictionaries(NAMES, st.sampled_from(SAMPLES), max_size=4),
    st.dictionaries(st.text(max_size=5), PLAIN, max_size=4),
    st.data(),
)
def test_round_trip_and_one_changed_byte(tensors, scalars, data):
    packed = pack({name: tensors[name].clone() for name in tensors}, scalars)
    found = unpack(packed)
    assert {n: bits(x) for n, x in found.tensors.items()} == {n: bits(x) for n, x in tensors.items()}
    assert found.scalars == scalars
    place = data.draw(st.integers(0, len(packed) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != packed[place]))
    refused(packed[:place] + bytes([other]) + packed[place + 1 :])
