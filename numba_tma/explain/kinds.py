"""What an instruction is for, in the same words for PTX and SASS, so that the two can be counted beside each other."""

from __future__ import annotations

COPY_ENGINE = "copy engine"
CP_ASYNC = "cp.async"
MBARRIER = "mbarrier"
TENSOR_CORE = "tensor core"
SYNCHRONISATION = "barriers, fences"
SHARED = "shared memory"
GLOBAL = "global memory"
LOCAL = "local memory"
PARAMETERS = "parameters"
FLOATING = "floating point"
INTEGER = "integer, logic"
UNIFORM = "uniform unit"
LANES = "between lanes"
MOVES = "moves, conversions"
CONTROL = "control flow"
OTHER = "other"

KINDS = (
    COPY_ENGINE,
    CP_ASYNC,
    MBARRIER,
    TENSOR_CORE,
    SYNCHRONISATION,
    SHARED,
    GLOBAL,
    LOCAL,
    PARAMETERS,
    FLOATING,
    INTEGER,
    UNIFORM,
    LANES,
    MOVES,
    CONTROL,
    OTHER,
)

# The longest prefix of whole words wins.
_PTX = {
    "cp.async.bulk": COPY_ENGINE,
    "cp.reduce.async.bulk": COPY_ENGINE,
    "tensormap": COPY_ENGINE,
    "prefetch.tensormap": COPY_ENGINE,
    "fence.proxy.tensormap": SYNCHRONISATION,
    "cp.async": CP_ASYNC,
    "cp.async.mbarrier": MBARRIER,
    "mbarrier": MBARRIER,
    "wgmma": TENSOR_CORE,
    "mma": TENSOR_CORE,
    "wmma": TENSOR_CORE,
    "ldmatrix": SHARED,
    "stmatrix": SHARED,
    "bar": SYNCHRONISATION,
    "barrier": SYNCHRONISATION,
    "fence": SYNCHRONISATION,
    "membar": SYNCHRONISATION,
    "griddepcontrol": SYNCHRONISATION,
    "createpolicy": GLOBAL,
    "prefetch": GLOBAL,
    "multimem": GLOBAL,
    "shfl": LANES,
    "vote": LANES,
    "match": LANES,
    "redux": LANES,
    "elect": LANES,
    "activemask": LANES,
    "mov": MOVES,
    "movmatrix": LANES,
    "cvt": MOVES,
    "cvta": MOVES,
    "selp": MOVES,
    "prmt": MOVES,
    "mapa": MOVES,
    "isspacep": MOVES,
    "getctarank": MOVES,
    "bra": CONTROL,
    "brx": CONTROL,
    "call": CONTROL,
    "ret": CONTROL,
    "exit": CONTROL,
    "trap": CONTROL,
    "brkpt": CONTROL,
    "nanosleep": CONTROL,
    "setmaxnreg": CONTROL,
    "pmevent": CONTROL,
}
_MEMORY = frozenset(("ld", "ldu", "st", "atom", "red"))
_SPACES = {
    "shared": SHARED,
    "shared::cta": SHARED,
    "shared::cluster": SHARED,
    "local": LOCAL,
    "param": PARAMETERS,
    "const": PARAMETERS,
}
_FLOATS = ("f16", "f32", "f64", "bf16", "tf32", "e4m3", "e5m2")

_SASS = {
    COPY_ENGINE: "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP UBLKRED UBLKPF",
    CP_ASYNC: "LDGSTS LDGDEPBAR",
    MBARRIER: "SYNCS ARRIVES",
    TENSOR_CORE: "HGMMA IGMMA QGMMA BGMMA WARPGROUP WARPGROUPSET HMMA IMMA DMMA BMMA QMMA",
    SYNCHRONISATION: "BAR MEMBAR FENCE ERRBAR CGAERRBAR CCTL CCTLL UCGABAR_ARV UCGABAR_WAIT DEPBAR ACQBULK PREEXIT",
    SHARED: "LDS STS LDSM STSM ATOMS STAS REDAS",
    GLOBAL: "LD ST LDG STG ATOM ATOMG RED REDG",
    LOCAL: "LDL STL",
    PARAMETERS: "LDC ULDC LDCU",
    FLOATING: """FADD FADD2 FADD32I FMUL FMUL2 FMUL32I FFMA FFMA2 FFMA32I FMNMX FSETP FSET FSEL FCHK FSWZADD FRND MUFU
        DADD DMUL DFMA DSETP DMNMX HADD2 HADD2_32I HMUL2 HMUL2_32I HFMA2 HFMA2_32I HMNMX2 HSETP2 HSET2""",
    INTEGER: """IADD IADD3 IADD32I IMAD IMUL IMUL32I IABS IDP IDP4A IMNMX ISETP ISCADD LEA LOP LOP3 LOP32I PLOP3 PSETP
        SHF SHL SHR FLO POPC BREV BMSK SGXT VIADD VIADDMNMX VIMNMX VIMNMX3 VABSDIFF VABSDIFF4 VHMNMX""",
    LANES: "SHFL VOTE VOTEU MATCH REDUX CREDUX ELECT R2UR MOVM WARPSYNC ENDCOLLECTIVE",
    MOVES: "MOV MOV32I SEL PRMT P2R R2P S2R CS2R F2F F2FP F2I I2F I2FP I2I I2IP F2IP S2UR R2B B2R BMOV",
    CONTROL: "BRA BRX BRXU JMP JMX BSSY BSYNC BREAK CALL RET EXIT KILL NOP YIELD BPT NANOSLEEP USETMAXREG RPCMOV LEPC",
}
_SASS_KINDS = {name: kind for kind, names in _SASS.items() for name in names.split()}


def ptx_kind(mnemonic: str) -> str:
    """The kind of a PTX instruction, such as 'mbarrier.init.shared::cta.b64'."""
    words = mnemonic.split(".")
    if words[0] in _MEMORY:
        return next((_SPACES[word] for word in words if word in _SPACES), GLOBAL)
    for length in range(len(words), 0, -1):
        kind = _PTX.get(".".join(words[:length]))
        if kind is not None:
            return kind
    return FLOATING if any(word.startswith(_FLOATS) for word in words[1:]) else INTEGER


def sass_kind(mnemonic: str) -> str:
    """The kind of a SASS instruction, such as 'UTMALDG.2D'."""
    name = mnemonic.split(".")[0]
    kind = _SASS_KINDS.get(name)
    if kind is not None:
        # Adding nothing to a half in 32 bits is how SASS widens it, multiplying by nothing how it moves a constant.
        return MOVES if mnemonic.startswith(("HADD2.F32", "HFMA2.MMA", "IMAD.MOV")) else kind
    return UNIFORM if name.startswith("U") else OTHER
