"""The grids of GGUF's types of one to three bits: an index of theirs stands for four or eight levels at once.

They are part of the format, chosen by llama.cpp's authors. A grid's entries are numbers. Their digits, of two or of
three bits and the lowest first, are indices of its levels. They ascend, so that their differences are stored.
"""

from __future__ import annotations

import base64
import functools
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Grid(NamedTuple):
    """The size of a grid and the levels that its digits stand for."""

    entries: int
    digits: int  # of an entry
    levels: tuple[int, ...]

    @property
    def bits(self) -> int:
        """The bits of a digit."""
        return 2 if len(self.levels) <= 4 else 3


_TWO = (8, 25, 43)
GRIDS = {
    "IQ1": Grid(2048, 8, (-8, 0, 8)),  # eight times the levels, plus or minus one
    "IQ2_XXS": Grid(256, 8, _TWO),
    "IQ2_XS": Grid(512, 8, _TWO),
    "IQ2_S": Grid(1024, 8, _TWO),
    "IQ3_XXS": Grid(256, 4, (2, 6, 10, 14, 18, 22, 26, 31)),  # half of the levels
    "IQ3_S": Grid(512, 4, (1, 3, 5, 7, 9, 11, 13, 15)),
}
# Differences of 16 bits, grid by grid: first the low bytes of all, then the high ones.
_COMPRESSED = (
    b"c-rk(U5p&X5x%bO>gk#3o!PzHz1g3++u8f~56;Gxu|b5$!~q=3L?Uw5K5y7Ng6zYGiA6%}pp%GE@|MR45h1`Lkt{`#h@(6ZSs*JYQ6BOT-g!x05m"
    b"J;qAVo-|YG(iLd>CZFcSx*sH~mvx^;OkZH9aFBB{<3l4K*tvtkJ;d*`lDS6n>1-mFP%-3En@|+pk&UV?+Z-DTf|sXfrkzJ+a%^wiF_yg$Pj#8cT="
    b"GM0rKFc)E%U($bO<C}S(}%s?v+Ae^EdU&NtMG*}=scG$X6HCCEVPm5GiS_Uf=$@;2I2iPp3j|qhUhJp1!T6vBg)wCnQgF3s_M(Gn!gEb`}!$`X^I"
    b"*Q@bT%F_~^gW@GpK288Vgw*0WUdMgGWDMoVKv<$H6V=S{a6_p;tGZ_<HPh6a1aWsKqk}#u<29}V%-RG0Oe9HfXS{q95Ga<vq%t@ZYX+F4w{_+v{|"
    b"U@zLvJ_^izz|#=Y68kV0C|Tm?&UK%*YB)<jtpX|=)rlOFQO2gg!=ePL?gd8Y@7kOekAPJbOkrW<sYnG=&?U!3Z0rG|$Ri{T6#CCz)#;39{BOme_v"
    b"+~tVyInI<IQX{_4Ns0>+Jxu&UyQuPAG0GZ=A%}*boe;e&Ax7zwL!O3S$Vxx5q`9S(pSngIW**WihoPc~z+|gq75Wp7!;wg{Ly>ALp|oN#s3JNUp{"
    b"PVuoMLCeb9;cD_i$ICopA`+0%mrtoTNYId^;l*sc?|I?m}gakZs5cNoIbuD3zpTvg?^E6Uws^-jcAHZz|&>5hin1WY8j$#gTl+Rt8oKQ?_faZ?<="
    b"ubgAAXja!RG(4}urx~#Gz1IVf((~&~MgHtJZ>AJNnPh^O6P(+!+gFM;zM%T+qne>G1s2pk(L<#be7ML=TYf_>-mXg<ETCO0=rLdin$O<K?#wbrTs"
    b"%pbMVFl&9Kq^QxOU!$M{7{4~N?TvAWb3pBjDk7QPD@tq>M=;BftVowxgRiqMaTLY1f@1}4>Za$6|hG-90lqLa*gQfnAkeODFVS1iYT(+cJo>W?Nb"
    b"KT3c?N&Bt@Q36M+J|*ee=l=(@7uX-vYvAtoBcRL4VIah~e0FMXC;W==8xcHxR4CR(=NtALbsSw{(0G1W>9M-d-Y&AMK@rzPUvYgN?8z{QjGE^b${"
    b"QCQcNCF~q3a!Mh+KDcy6Ei0jJ&*O|m=!=Zdb+9t6vo_nRcTveWgs~G`Ofsl?T@H~vNpm5a7WO)>QA$Lc@kqKE;WcNvMM+SOPRYd8Ze<lv7!X9HHh"
    b"B?K?kF9eNVr#ZG8AcduJ(z-Z873E7v-yy&(~9L+!-#!v%^7<^Zh6gmr3nzY0`IJ!v`fF*PvZ@V^jPA<-n@m%ObwijY78(*sPyX1)O6yR2{fTz`%@"
    b"$Oi$>MW`3RZkXm{iBGYSLpB;$wvow<VW;xZ;5=~+-<qnzKb-1_!$<njZ7HCbE8`2hu73I0<sBqC~9!}_$X^Vso?p(X)&!g{=Ts@hwxN6ExZ|*mZY"
    b"o?4d2VVHr%j54#+dT9vzIgRDFn3SX;Y$5=_>k7de|u<p_r>y$e*Z>h*aRLKIiDP=<63wy7=6K%mnuIQeTSTH;<XcQ<E^9Tjcc4Gvv%*J?|ldt-~Z"
    b"0<3g+lLfBV2T7hX92)`OSPho|0r6U>1_&lMNm{x^G(T)zLIrw=5rLhiq|7%xA4_Al3_rgF_!{`JuQpS@o`_{XmQS+*<vD?^-J9GvCu3W;P(){x8R"
    b"vtfe`co#Mtg4Bz?M4^63+VLvfx7Lj`Qku;|;<Y#|=0akg^p-cMuwFE*qFIDhQrk=}_m<Ep5<zV9dU5~jlz~0Pz0ctCyC+&*6MQCFrhjJQ#i>UYPD"
    b")#et{*Bquu}QOqJi=K`>KCkxLAHv!+PvJbVHVLg17)tbiEso6wNtGe7tztyW3u6kuZ3<u+LUr{9q8E<|Pgdym|O^E9FHa>6nY=R}b9PDc%ttxikm"
    b"gSYt)O%yesJ?!hO=|JTIM_a49Y&xeAS2LWip92G73T`*UYC73iPx$<@;J1!hv{^7&Vn~D8%F!xCOhzUkdGM)CUP2KmOeHZZS*1UZNUdtc<_1}+PX"
    b"3Bd%zG{w9eN25fxqSQ|`<|j2xM<oxg;(KB<s<SB>Dz&T(EE2|e!1qE_f(keK3ZPgh3EyH4LW+tyVpH8J(Dfs4TQ7HT}9papYL15XdsH=cq_d=yY)"
    b";kJYSH3hPfjv1LM`+(abMzz3ENJevX@(CGA$;F>LuGKn^c3(jMgI&Q{mcdT(>BFIBngQLg)8ugH%u_Pop^ZvHmY=an^7?LnA4*$dnz#>T5$1(hoq"
    b"=DQP8^7E(5_s#T)&E8hmWx@6W;SS|xy>}d18{+`{N5;&4T;<NT)3^0te`a`he3ff>eWEtx<R+1>M3*+(9;i<n&-MP?n@d|p<%#K&>9sng(hZm@tA"
    b"y)l2Zxk2y~&+V{*tQx_`a2$<xZ#D3%FHeB(y1chJa8qDlK~J@Zf3>WPLM?)IPa6WeI$^Bk!4g<4#yeI+;E@>~<>RU7<s#7dOQ4gxk4)@+Efn@zxR"
    b"d-t%0DhBEQ6d4BdKLrglMnMk&Iq}Hw+{L|z!f7tsRzY3S8MgS1#h3mK#P&9P-HSJqN%k-H9%F}_;0{rQ*BKj7T9?S2GiV8|Wo~7vzd{G9v*M5cP&"
    b"Xk70&E<VHy`V<N?6Dw8g%rCFq}rhmOuCqp%ACj*9kp9Ef^yNTeG~kMKg^&+S6))#Lk%!j%7>$03&*s!wfbmjp;Yt(u<BSb6nR~ktk3$5pma<^us4"
    b"c~&PVkiF*_#6wu!#IJJ_3tU?Q2EozeF<X1}@+?4_&eXnwc1vxeijpwyu2%jn?|x>V2|DZSw<jRcVc;z-GB^uZ$~U1lA+M{1$y+C@{TGz;aV(Htv~"
    b"T0xE+^c4-Y)S*WgG?G^kBHa~(LP+;&UdgFqs*_D|MFn(Sr#ML9OR9E&I+!OJg_fT57y{`N3JcmNNIBqZbt#n$=atNHfasf46|~7za(p?H{LJyq8M"
    b"I{lbfPS!#|ib6NB&6V@=+c5+Lex^FBb>hobYo7(2G@3<-o_P!wMaa233nT{A~)kyr*bF9#-f>hpf58h``Xr*(qq1bLgDs<;KPmg6mI{CuHAo@*c6"
    b"o(MZ!GASw?-sp)piY@3ErUsNnz8Y+ci8GT<@G^wO>ma;*Z-9)<{>Rf~(%%P>=SdS`p3=Sj^9N@^7@_A=sd{q0W4SnA14??;%7E84qu%Bp00#@f8K"
    b"ZKYw=M*Ys8H`h^%RBQ)G(YlL{lu0XrXOx8`mL~sTMOdT;V*6bY<+qQxcwo1q0!;?4xHG+^4JCq`Likj@r7aQR=<M8?T(DNx%=YA5#G2fXdp^AHvp"
    b"Sj5d#tIFVP&L%>dGEb|5t(<cLl+tJ}yO@#(oEK4uL+{+PJ6P9r|SGJb-C{k-GQiWo|B>63yG!_Q5amFdG9REW>Hr--dohTFjn@!6sjw<1#7F8LIn"
    b"XU@be%HXY>61_+1Hh{!i(Ai%Uc+*2-d*7VD{C)YmeZT($E7(Wu"
)


@functools.cache
def grid(name: str) -> NDArray[np.int8]:
    """Return the levels [entries, digits] of a grid."""
    return _grids()[name]


def signs_with_parity(seven: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Return eight signs in each byte: seven that are stored, and an eighth that makes the negative ones even."""
    stored = seven.astype(np.uint8) & np.uint8(127)
    odd = np.bitwise_count(stored) & np.uint8(1)
    return stored | (odd << np.uint8(7))


def signed(magnitudes: NDArray[np.int8], signs: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Return levels [N, 8 n]: magnitudes [N, ...], negative where the bit of one of the bytes [N, n] is set."""
    negative = np.unpackbits(signs, axis=1, bitorder="little")
    levels: NDArray[np.int8] = magnitudes.reshape(negative.shape) * (np.int8(1) - np.int8(2) * negative.view(np.int8))
    return levels


@functools.cache
def _grids() -> dict[str, NDArray[np.int8]]:
    planes = np.frombuffer(zlib.decompress(base64.b85decode(_COMPRESSED)), np.uint8).reshape(2, -1)
    differences = planes[0] | (planes[1].astype(np.uint16) << np.uint16(8))
    found, start = {}, 0
    for name, kind in GRIDS.items():
        entries = np.cumsum(differences[start : start + kind.entries], dtype=np.uint16)
        shifts = np.arange(kind.digits, dtype=np.uint16) * np.uint16(kind.bits)
        digits = (entries[:, None] >> shifts) & np.uint16((1 << kind.bits) - 1)
        found[name] = np.array(kind.levels, np.int8)[digits]
        start += kind.entries
    return found
