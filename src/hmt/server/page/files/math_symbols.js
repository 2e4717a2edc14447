// What LaTeX's commands stand for.

const words = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split("=")));

export const SYMBOLS = words(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ
  lambda=λ mu=μ nu=ν xi=ξ omicron=ο pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ
  phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ
  Phi=Φ Psi=Ψ Omega=Ω infty=∞ partial=∂ nabla=∇ emptyset=∅ varnothing=∅ ell=ℓ hbar=ℏ Re=ℜ Im=ℑ
  aleph=ℵ forall=∀ exists=∃ nexists=∄ top=⊤ bot=⊥ angle=∠ triangle=△ square=□ imath=ı jmath=ȷ wp=℘
  dots=… ldots=… cdots=⋯ vdots=⋮ ddots=⋱ dotsc=… dotsb=⋯ degree=° prime=′ checkmark=✓ blacksquare=■
  %=% $=$ #=# _=_ &=&
`);

export const OPERATORS = words(`
  times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗ odot=⊙
  leq=≤ le=≤ geq=≥ ge=≥ neq=≠ ne=≠ equiv=≡ approx=≈ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ lt=< gt=>
  in=∈ notin=∉ ni=∋ subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇ subsetneq=⊊ cup=∪ cap=∩ setminus=∖
  land=∧ wedge=∧ lor=∨ vee=∨ lnot=¬ neg=¬ vdash=⊢ models=⊨ mid=∣ nmid=∤ parallel=∥ perp=⊥
  to=→ rightarrow=→ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔
  implies=⟹ impliedby=⟸ iff=⟺ mapsto=↦ longrightarrow=⟶ longleftarrow=⟵ longmapsto=⟼ Longrightarrow=⟹
  uparrow=↑ downarrow=↓ updownarrow=↕ hookrightarrow=↪ rightharpoonup=⇀ rightleftharpoons=⇌
  nearrow=↗ searrow=↘ prec=≺ succ=≻ preceq=⪯ succeq=⪰ lesssim=≲ gtrsim=≳ asymp=≍ doteq=≐ coloneqq=≔
  therefore=∴ because=∵ dagger=† backslash=\\ colon=: amalg=⨿ bowtie=⋈ wr=≀
  lbrace={ rbrace=} {={ }=} langle=⟨ rangle=⟩ lceil=⌈ rceil=⌉ lfloor=⌊ rfloor=⌋ vert=| lvert=| rvert=|
  Vert=‖ lVert=‖ rVert=‖ |=‖ lbrack=[ rbrack=]
`);

export const BIG = words(`
  sum=∑ prod=∏ coprod=∐ int=∫ iint=∬ iiint=∭ oint=∮ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂
  bigvee=⋁ bigwedge=⋀ bigsqcup=⨆
`);

export const DELIMITERS = words(`
  {={ }=} lbrace={ rbrace=} langle=⟨ rangle=⟩ lceil=⌈ rceil=⌉ lfloor=⌊ rfloor=⌋ vert=| lvert=| rvert=|
  Vert=‖ lVert=‖ rVert=‖ |=‖ lbrack=[ rbrack=] backslash=\\ uparrow=↑ downarrow=↓
`);

const LIMITED = "lim limsup liminf max min sup inf det gcd Pr argmax argmin";
export const LIMITS = new Set(LIMITED.split(" "));
export const FUNCTIONS = new Set(
  `${LIMITED} sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp dim ker deg arg hom mod bmod`.split(" "),
);

export const SPACES = {
  ",": "0.1667em", ":": "0.2222em", ">": "0.2222em", ";": "0.2778em", "!": "-0.1667em", " ": "0.33em",
  quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.1667em",
};

export const ACCENTS = {
  hat: ["^"], widehat: ["^"], bar: ["¯"], overline: ["¯"], vec: ["→"], overrightarrow: ["→"], tilde: ["~"],
  widetilde: ["~"], dot: ["˙"], ddot: ["¨"], check: ["ˇ"], breve: ["˘"], acute: ["´"], grave: ["`"],
  overbrace: ["⏞"], underbrace: ["⏟", "below"], underline: ["_", "below"],
};

/** Letters in one of Unicode's mathematical alphabets; `holes` are those that Unicode had before. */
function shifted(upper, lower, digit, holes = {}) {
  return (letter) => {
    if (Object.hasOwn(holes, letter)) return holes[letter];
    const code = letter.codePointAt(0);
    if (/^[A-Z]$/.test(letter)) return String.fromCodePoint(upper + code - 65);
    if (/^[a-z]$/.test(letter)) return String.fromCodePoint(lower + code - 97);
    if (digit && /^[0-9]$/.test(letter)) return String.fromCodePoint(digit + code - 48);
    return letter;
  };
}

const BOLD = { letters: shifted(0x1d400, 0x1d41a, 0x1d7ce), upright: true };
const DOUBLE = words("C=ℂ H=ℍ N=ℕ P=ℙ Q=ℚ R=ℝ Z=ℤ");
const SCRIPT = words("B=ℬ E=ℰ F=ℱ H=ℋ I=ℐ L=ℒ M=ℳ R=ℛ e=ℯ g=ℊ o=ℴ");
const FRAKTUR = words("C=ℭ H=ℌ I=ℑ R=ℜ Z=ℨ");
const CALLIGRAPHIC = { letters: shifted(0x1d49c, 0x1d4b6, 0, SCRIPT) };

export const ALPHABETS = {
  mathrm: { letters: null, upright: true },
  mathsf: { letters: shifted(0x1d5a0, 0x1d5ba, 0x1d7e2), upright: true },
  mathtt: { letters: shifted(0x1d670, 0x1d68a, 0x1d7f6), upright: true },
  mathit: { letters: shifted(0x1d434, 0x1d44e, 0, { h: "ℎ" }) },
  mathbf: BOLD,
  boldsymbol: BOLD,
  bm: BOLD,
  mathbb: { letters: shifted(0x1d538, 0x1d552, 0x1d7d8, DOUBLE) },
  mathcal: CALLIGRAPHIC,
  mathscr: CALLIGRAPHIC,
  mathfrak: { letters: shifted(0x1d504, 0x1d51e, 0, FRAKTUR) },
};

// What stands before and after the table, and how it is set.
export const ENVIRONMENTS = {
  matrix: ["", "", "matrix"],
  pmatrix: ["(", ")", "matrix"],
  bmatrix: ["[", "]", "matrix"],
  Bmatrix: ["{", "}", "matrix"],
  vmatrix: ["|", "|", "matrix"],
  Vmatrix: ["‖", "‖", "matrix"],
  smallmatrix: ["", "", "matrix"],
  cases: ["{", "", "cases"],
  array: ["", "", "array"],
  aligned: ["", "", "aligned"],
  align: ["", "", "aligned"],
  "align*": ["", "", "aligned"],
  split: ["", "", "aligned"],
  gathered: ["", "", "matrix"],
  gather: ["", "", "matrix"],
  "gather*": ["", "", "matrix"],
  equation: ["", "", "matrix"],
  "equation*": ["", "", "matrix"],
};
