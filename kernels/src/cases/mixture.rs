//! A mixture of experts behind the logits of its router, with and without adapters, and its
//! gradient.

use super::slices::Slice;
use super::*;

/// How many tokens go to how many experts, and the sizes of those.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    tokens: usize,
    experts: usize,
    /// Experts of a token.
    chosen: usize,
    hidden: usize,
    /// Between gate and down.
    middle: usize,
}

impl Sizes {
    /// In the order of the fields.
    const fn of([tokens, experts, chosen, hidden, middle]: [usize; 5]) -> Sizes {
        Sizes { tokens, experts, chosen, hidden, middle }
    }
}

/// Gate, up and down of two experts, and the two factors of each adapter of each of the three.
type Stored = ([[CaseMatrix; 2]; 3], [[[Vec<u8>; 2]; 3]; 3]);

/// Of the experts of a rank: the first of its columns, and the columns of all ranks.
type Share = (usize, usize);

/// Columns that begin and end with groups; that cut groups; and that do so only where they end.
const SLICES: [((Sizes, Share), Class); 3] = [
    ((Sizes::of([35, 2, 1, 64, 128]), (64, 256)), Class::Smallest),
    ((Sizes::of([5, 4, 3, 128, 70]), (31, 150)), Class::Smallest),
    ((Sizes::of([140, 2, 2, 64, 64]), (96, 192)), Class::Quick),
];

/// A few rows; rows past a tile of GEMV, and past one of GEMM; widths that tiles do not take, one of
/// them, or neither.
const SHAPES: [(Sizes, Class); 8] = [
    (Sizes::of([3, 3, 2, 64, 64]), Class::Smallest),
    (Sizes::of([33, 1, 1, 64, 64]), Class::Smallest),
    (Sizes::of([35, 2, 1, 64, 128]), Class::Quick),
    (Sizes::of([5, 4, 3, 50, 64]), Class::Smallest),
    (Sizes::of([140, 2, 2, 64, 64]), Class::Quick),
    (Sizes::of([33, 40, 5, 64, 192]), Class::Full),
    (Sizes::of([200, 3, 2, 192, 64]), Class::Full),
    (Sizes::of([64, 8, 2, 4096, 14336]), Class::Served),
];

/// Ranks of the adapters of each matrix.
const RANKS: [usize; 3] = [8, 5, 3];
const MAX_RANK: usize = 8;

/// Experts of one block, and the tokens that go to them.
#[derive(Clone, Debug)]
pub(super) struct MixtureCase {
    is_grad: bool,
    tokens: usize,
    experts: usize,
    chosen: usize,
    hidden: usize,
    middle: usize,
    quant: QuantType,
    dtype: DType,
    is_adapted: bool,
    is_measured: bool,
    share: Option<Share>,
    stored: OnceCell<Stored>,
}

/// A layer on a device.
struct Loaded<'w, B: Subject> {
    experts: B::Experts<'w>,
    tables: Option<[B::Adapters<'w>; 3]>,
}

/// What both operations take, on a device.
struct MixtureOperands<'a, B: Subject> {
    of_tokens: &'a [Option<u32>],
    x: B::Buffer,
    grad: B::Buffer,
    logits: B::Buffer,
    out: B::Buffer,
    workspace: Vec<B::Buffer>,
}

impl MixtureCase {
    /// The case, and that of its gradient.
    fn pair(
        sizes: Sizes,
        quant: QuantType,
        dtype: DType,
        is_adapted: bool,
        is_measured: bool,
    ) -> [MixtureCase; 2] {
        let Sizes { tokens, experts, chosen, hidden, middle } = sizes;
        [false, true].map(|is_grad| MixtureCase {
            is_grad,
            tokens,
            experts,
            chosen,
            hidden,
            middle,
            quant,
            dtype,
            is_adapted,
            is_measured,
            share: None,
            stored: OnceCell::new(),
        })
    }

    /// (inputs, outputs) of gate, up and down.
    fn sides(&self) -> [(usize, usize); 3] {
        let (hidden, middle) = (self.hidden, self.middle);
        [(hidden, middle), (hidden, middle), (middle, hidden)]
    }

    /// Bytes of each of the three.
    fn bytes(&self) -> [usize; 3] {
        self.sides().map(|(inputs, outputs)| {
            stored_bytes(self.quant, self.dtype, outputs, inputs).unwrap_or(0)
        })
    }

    /// A factor of an adapter.
    fn factor(&self, seed: u64, inputs: usize, outputs: usize) -> Vec<u8> {
        encode(QuantType::None, self.dtype, inputs, &scaled(seed, inputs, outputs))
    }

    /// Matrix `which` of an expert.
    fn expert(&self, which: usize, seed: u64) -> CaseMatrix {
        let (quant, dtype, (inputs, outputs)) = (self.quant, self.dtype, self.sides()[which]);
        let matrix = match (self.share, which) {
            (None, _) => CaseMatrix::new(quant, dtype, inputs, outputs),
            (Some((first, all)), 2) => {
                let (rows, columns) = (0..outputs, first..first + inputs);
                CaseMatrix::slice(quant, dtype, Slice::new((all, outputs), &[rows], columns))
            }
            (Some((first, all)), _) => {
                let rows = first..first + outputs;
                CaseMatrix::slice(quant, dtype, Slice::new((inputs, all), &[rows], 0..inputs))
            }
        };
        let (inputs, outputs) = matrix.stored_size();
        matrix.of_values(&scaled(seed, inputs, outputs))
    }

    fn stored(&self) -> &Stored {
        self.stored.get_or_init(|| {
            let sides = self.sides();
            let adapters = sides.map(|(inputs, outputs)| {
                RANKS.map(|rank| {
                    let seed = (inputs + rank) as u64;
                    [self.factor(seed, inputs, rank), self.factor(seed + 1, rank, outputs)]
                })
            });
            ([0, 1, 2].map(|which| [1, 2].map(|seed| self.expert(which, seed))), adapters)
        })
    }

    fn load<'w, 'a: 'w, B: Subject>(
        &'w self,
        bench: &mut Bench<'a, B>,
    ) -> Result<Loaded<'w, B>, Failure> {
        let (sides, bytes) = (self.sides(), self.bytes());
        let matrices = [0, 1, 2]
            .map(|which| bench.weights(bytes[which], || self.stored().0[which][0].bytes(false)));
        let mut experts = Vec::new();
        for number in 0..self.experts {
            let mut matrix = |which: usize| {
                if self.is_measured {
                    let (all, (inputs, outputs)) = (&matrices[which], sides[which]);
                    let bytes = all[(number * 3 + which) % all.len()];
                    return bench.matrix(view(self.quant, self.dtype, inputs, outputs, bytes));
                }
                // Taken in different orders, so that an expert is not its neighbour.
                let matrix = &self.stored().0[which][(number >> which) % 2];
                bench.matrix(matrix.view(matrix.bytes(false)))
            };
            experts.push(Expert { gate: matrix(0)?, up: matrix(1)?, down: matrix(2)? });
        }
        let experts = bench.device.experts(experts);
        let experts = bench.op(experts)?;
        let tables = match self.is_adapted {
            true => Some([self.table(bench, 0)?, self.table(bench, 1)?, self.table(bench, 2)?]),
            false => None,
        };
        Ok(Loaded { experts, tables })
    }

    /// The adapters of one matrix of all experts, each scaled in its own way and some not there.
    fn table<'w, B: Subject>(
        &'w self,
        bench: &mut Bench<'_, B>,
        which: usize,
    ) -> Result<B::Adapters<'w>, Failure> {
        let ((inputs, outputs), stored) = (self.sides()[which], &self.stored().1[which]);
        let mut adapters = Vec::new();
        for at in 0..self.experts * RANKS.len() {
            let (expert, number) = (at / RANKS.len(), at % RANKS.len());
            if (expert + number + which) % 4 == 3 {
                adapters.push(None);
                continue;
            }
            let (rank, [a, b]) = (RANKS[number], &stored[number]);
            let scale = 0.25 + 0.125 * (expert % 5) as f32;
            let a = bench.matrix(view(QuantType::None, self.dtype, inputs, rank, a))?;
            let b = bench.matrix(view(QuantType::None, self.dtype, rank, outputs, b))?;
            adapters.push(Some(Adapter { a, b, scale }));
        }
        let adapters = bench.device.adapters(adapters);
        bench.op(adapters)
    }

    /// The adapter of each token; one token has a number that no adapter has.
    fn of_tokens(&self, rows: &Range<usize>) -> Vec<Option<u32>> {
        let numbers = [Some(1), Some(1), None, Some(0), Some(2), Some(7)];
        numbers.into_iter().cycle().skip(rows.start).take(rows.len()).collect()
    }

    /// Distinct for the chosen of every token, so that rounding changes no choice. In a check the
    /// first expert goes to most tokens, some experts to none; in a measurement every token goes to
    /// two neighbours, every pair of neighbours as often.
    fn logits(&self, rows: &Range<usize>) -> Vec<f32> {
        let (experts, chosen) = (self.experts, self.chosen);
        let of = |token: usize| {
            (0..experts).map(move |expert| match self.is_measured {
                true => -(((expert + experts - token * chosen % experts) % experts) as f32),
                false => -0.25 * ((expert + (token % 3) * (token % 2)) % experts) as f32,
            })
        };
        rows.clone().flat_map(of).collect()
    }
}

impl MixtureCase {
    /// Lengths of the workspace, in the order in which [`launch`](Self::launch) takes it.
    fn workspace_lens(&self, tokens: usize) -> [usize; 9] {
        let pairs = tokens * self.chosen;
        let (middle, given, weights) =
            (pairs * self.middle, pairs * self.hidden, tokens * self.experts);
        let lists = list_words(tokens, self.chosen, self.experts);
        [middle, middle, middle, given, given, weights, weights, lists, pairs * MAX_RANK]
    }

    fn launch<B: Subject>(
        &self,
        device: &mut B,
        loaded: &Loaded<'_, B>,
        operands: &mut MixtureOperands<'_, B>,
    ) -> Result<(), OpError> {
        let MixtureOperands { of_tokens, x, grad, logits, out, workspace } = operands;
        let [gate, up, middle, first, second, weights, shares, lists, between] = &mut workspace[..]
        else {
            unreachable!("as many as their lengths")
        };
        let (experts, chosen, round) = (&loaded.experts, self.chosen, self.dtype);
        let (x, logits, out) = (&**x, &mut **logits, &mut **out);
        let (gate, up, given, lists) = (&mut **gate, &mut **up, &mut **first, &mut **lists);
        let tokens = of_tokens.len();
        let adapters = loaded.tables.as_ref().map(|tables| ExpertAdapters {
            tables: tables.each_ref().map(Some),
            count: RANKS.len(),
            of_tokens,
            middle: &mut **between,
        });
        if !self.is_grad {
            let workspace = MixtureWorkspace { gate, up, given, lists };
            return device.mixture(Mixture {
                x,
                logits,
                experts,
                adapters,
                tokens,
                chosen,
                workspace,
                out,
                round,
            });
        }
        let workspace = MixtureGradWorkspace {
            gate,
            up,
            grad: &mut **middle,
            given: [given, &mut **second],
            weights: &mut **weights,
            shares: &mut **shares,
            lists,
        };
        device.mixture_grad(MixtureGrad {
            x,
            grad: &**grad,
            logits,
            experts,
            adapters,
            tokens,
            chosen,
            workspace,
            out,
            round,
        })
    }
}

/// Values that keep the size of what they are multiplied with.
fn scaled(seed: u64, inputs: usize, outputs: usize) -> Vec<f32> {
    let size = (3.0 / inputs as f32).sqrt();
    noise(seed, inputs * outputs).iter().map(|v| v * size).collect()
}

impl Case for MixtureCase {
    fn cases(class: Class) -> Vec<Self> {
        let dtypes: &[DType] = if class == Class::Smallest { &[DType::Bf16] } else { &DTYPES };
        let mut all = Vec::new();
        for (sizes, _) in SHAPES.into_iter().filter(|(_, at)| *at <= class) {
            // Many tokens fill the tiles of GEMM, which f32 does not go to, and both others alike.
            let is_tiled = |dtype: &&DType| sizes.tokens <= 100 || **dtype == DType::Bf16;
            for quant in FORMATS {
                for &dtype in dtypes.iter().filter(is_tiled) {
                    all.extend(MixtureCase::pair(sizes, quant, dtype, false, false));
                    // Adapters go beside any format in the same way.
                    if quant == QuantType::Nf4 || (quant, dtype) == (QuantType::None, DType::F32) {
                        all.extend(MixtureCase::pair(sizes, quant, dtype, true, false));
                    }
                }
            }
        }
        for ((sizes, share), _) in SLICES.into_iter().filter(|(_, at)| *at <= class) {
            for quant in FORMATS.into_iter().skip(1) {
                let pair = MixtureCase::pair(sizes, quant, DType::Bf16, true, false);
                all.extend(pair.map(|case| MixtureCase { share: Some(share), ..case }));
            }
        }
        all
    }

    /// A Mixtral of half the widths.
    fn measured(shapes: &Shapes) -> Vec<Self> {
        let formats = shapes.formats.iter().filter(|(_, dtype)| *dtype == DType::Bf16);
        let of = |&(quant, dtype): &(QuantType, DType)| {
            shapes.rows.iter().flat_map(move |&tokens| {
                let (hidden, middle) = (shapes.hidden / 2, shapes.middle / 2);
                let sizes = Sizes { tokens, experts: 8, chosen: 2, hidden, middle };
                MixtureCase::pair(sizes, quant, dtype, false, true)
            })
        };
        formats.flat_map(of).collect()
    }

    fn operation(&self) -> &'static str {
        if self.is_grad { "mixture_grad" } else { "mixture" }
    }

    fn shape(&self) -> String {
        let MixtureCase { tokens, experts, chosen, hidden, middle, quant, dtype, .. } = self;
        let adapters = if self.is_adapted { " adapters" } else { "" };
        let share = match self.share {
            Some((first, all)) => format!(" from {first} of {all}"),
            None => String::new(),
        };
        format!(
            "{dtype} {quant} {chosen} of {experts} {hidden}x{middle}{share}{adapters} tokens {tokens}"
        )
    }

    fn rows(&self) -> usize {
        self.tokens
    }

    /// What is large is compared by some of its rows.
    fn reference_rows(&self) -> usize {
        if self.hidden * self.middle > 1_000_000 { 2 } else { self.tokens }
    }

    /// Half of the types round what lies between, so that a bit of a sum may become one of theirs;
    /// NF4 goes another way. Adapters round once more, and are scaled. What tensor cores multiply in
    /// a gradient is rounded to bfloat16, twice one after the other.
    fn tolerance(&self, _: Arithmetic) -> f32 {
        match (self.dtype, self.is_grad) {
            (DType::F32, true) if self.quant != QuantType::None => 1e-4,
            (DType::F32, _) => 2e-5,
            (_, true) => 2e-2,
            (DType::Bf16, false) if self.is_adapted => 3e-2,
            (DType::Bf16, false) => 1.6e-2,
            (DType::F16, false) => 2e-3,
        }
    }

    fn work(&self) -> Work {
        let [gate, up, down] = self.bytes();
        let pairs = self.tokens * self.chosen;
        let products = pairs * self.hidden * self.middle;
        // A gradient reads gate and up twice.
        let (reads, operations) = if self.is_grad { (2, 10 * products) } else { (1, 6 * products) };
        Work { bytes: self.experts.min(pairs) * (reads * (gate + up) + down), operations }
    }

    /// The output, or the gradients of the input and of the logits.
    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, rows: Range<usize>) -> Outcome {
        let loaded = self.load(bench)?;
        let (of_tokens, host_logits) = (self.of_tokens(&rows), self.logits(&rows));
        let lens = self.workspace_lens(rows.len());
        let mut operands = MixtureOperands::<B> {
            of_tokens: &of_tokens,
            x: bench.input(&rows_of(5, self.tokens, self.hidden, &rows))?,
            grad: bench.input(&rows_of(6, self.tokens, self.hidden, &rows))?,
            logits: bench.in_place(&host_logits)?,
            out: bench.output(rows.len() * self.hidden)?,
            workspace: Vec::new(),
        };
        for len in lens {
            operands.workspace.push(bench.output(len)?);
        }
        bench.launch(|device, run| {
            if run > 0 {
                // The results took the place of the logits.
                device.upload(&host_logits, &mut operands.logits)?;
            }
            self.launch(device, &loaded, &mut operands)
        })?;
        for (buffer, len) in operands.workspace.iter().zip(lens) {
            bench.take(buffer, len)?;
        }
        let out = bench.take(&operands.out, rows.len() * self.hidden)?;
        Ok(match self.is_grad {
            true => vec![out, bench.take(&operands.logits, host_logits.len())?],
            false => vec![out],
        })
    }
}
