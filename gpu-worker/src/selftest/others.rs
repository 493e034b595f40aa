//! Rows of the operations that are neither products nor attention forward: norms, positions, the moves of rows, adapters, experts, and all
//! of the way back.

use std::io::Write;

use kernels::ops::{
    Adapt, AdaptGrad, Adapter, Add, Attention, AttentionGrad, Expert, ExpertsGradRoom, ExpertsRoom,
    Gather, Gelu, GeluGrad, GeluKind, JoinQkv, Known, KvAppend, Layernorm, LinearGrad, Mixture,
    MixtureGrad, NormGrad, Rmsnorm, Rope, RopeTable, SiluMul, SiluMulGrad, SplitQkv,
    experts::list_words,
};
use kernels::{DType, PageLayout, QuantType, WeightView, quant};
use shared::ids::PageId;
use shared::model::PAGE_TOKENS;

use super::Ended;
use super::roofline::{Bench, FORMATS, HEAD_DIM, page, steps};
use crate::device::Paged;

/// Type in which blocks compute here.
const ROUND: DType = DType::Bf16;
const EPS: f32 = 1e-5;
/// Experts, and those of a token: a Mixtral.
const EXPERTS: usize = 8;
const CHOSEN: usize = 2;
/// Rank of an adapter.
const RANK: usize = 16;

impl<B: Paged, W: Write> Bench<'_, B, W> {
    /// Norms and what else goes once over the hidden states or the middle of the MLP.
    pub(super) fn elementwise(&mut self, rows: usize) -> Result<(), Ended> {
        let (hidden, middle) = (self.sizes.hidden, self.sizes.middle);
        let (x, weight) = (self.filled(rows * hidden)?, self.filled(hidden)?);
        let mut out = self.filled(rows * hidden)?;
        self.row(
            &format!("rmsnorm {hidden} x {rows}"),
            8 * rows * hidden,
            |backend| {
                backend.rmsnorm(Rmsnorm {
                    x: &*x,
                    weight: &*weight,
                    out: &mut *out,
                    rows,
                    width: hidden,
                    eps: EPS,
                    round: ROUND,
                })
            },
        )?;
        self.row(
            &format!("layernorm {hidden} x {rows}"),
            8 * rows * hidden,
            |backend| {
                backend.layernorm(Layernorm {
                    x: &*x,
                    weight: &*weight,
                    bias: &*weight,
                    out: &mut *out,
                    rows,
                    width: hidden,
                    eps: EPS,
                    round: ROUND,
                })
            },
        )?;
        self.row(
            &format!("add {hidden} x {rows}"),
            12 * rows * hidden,
            |backend| {
                backend.add(Add {
                    x: &mut *out,
                    y: &*x,
                    len: rows * hidden,
                    round: ROUND,
                })
            },
        )?;
        self.row(
            &format!("norm gradient {hidden} x {rows}"),
            12 * rows * hidden,
            |backend| {
                backend.norm_grad(NormGrad {
                    x: &*x,
                    weight: &*weight,
                    grad: &mut *out,
                    rows,
                    width: hidden,
                    eps: EPS,
                    centered: false,
                })
            },
        )?;
        let len = rows * middle;
        let (mut gate, mut up, grad) = (self.filled(len)?, self.filled(len)?, self.filled(len)?);
        self.row(
            &format!("silu_mul {middle} x {rows}"),
            12 * len,
            |backend| {
                backend.silu_mul(SiluMul {
                    gate: &mut *gate,
                    up: &*up,
                    len,
                    round: ROUND,
                })
            },
        )?;
        self.row(&format!("gelu {middle} x {rows}"), 8 * len, |backend| {
            backend.gelu(Gelu {
                x: &mut *gate,
                len,
                kind: GeluKind::Tanh,
                round: ROUND,
            })
        })?;
        self.row(
            &format!("silu_mul gradient {middle} x {rows}"),
            20 * len,
            |backend| {
                backend.silu_mul_grad(SiluMulGrad {
                    gate: &mut *gate,
                    up: &mut *up,
                    grad: &*grad,
                    len,
                })
            },
        )?;
        self.row(
            &format!("gelu gradient {middle} x {rows}"),
            12 * len,
            |backend| {
                backend.gelu_grad(GeluGrad {
                    x: &*grad,
                    grad: &mut *gate,
                    len,
                    kind: GeluKind::Tanh,
                })
            },
        )
    }

    /// What happens to queries, keys and values between their products and attention.
    pub(super) fn positions(&mut self, rows: usize) -> Result<(), Ended> {
        let (hidden, kv) = (self.sizes.hidden, self.sizes.kv);
        let (heads, kv_heads) = (hidden / HEAD_DIM, kv / HEAD_DIM);
        let tables = vec![
            (0..rows.div_ceil(PAGE_TOKENS))
                .map(page)
                .collect::<Vec<PageId>>(),
        ];
        let steps = steps(&tables, rows, 0);
        let frequencies: Vec<f32> = (0..HEAD_DIM / 2).map(|i| 1.0 / (1.0 + i as f32)).collect();
        let mut table = self.filled(rows * HEAD_DIM)?;
        self.row(
            &format!("rope table x {rows}"),
            4 * rows * HEAD_DIM,
            |backend| {
                backend.rope_table(RopeTable {
                    rows: &steps,
                    inverse_frequencies: &frequencies,
                    out: &mut *table,
                    round: ROUND,
                })
            },
        )?;
        let (mut q, mut k, mut v) = (
            self.filled(rows * hidden)?,
            self.filled(rows * kv)?,
            self.filled(rows * kv)?,
        );
        self.row(
            &format!("rope {heads} heads x {rows}"),
            8 * rows * hidden,
            |backend| {
                backend.rope(Rope {
                    x: &mut *q,
                    table: &*table,
                    tokens: rows,
                    heads,
                    head_dim: HEAD_DIM,
                    round: ROUND,
                    inverse: false,
                })
            },
        )?;
        let wide = hidden + 2 * kv;
        let mut fused = self.filled(rows * wide)?;
        let shape = (kv_heads, hidden / kv);
        self.row(
            &format!("split of fused heads x {rows}"),
            8 * rows * wide,
            |backend| {
                backend.split_qkv(SplitQkv {
                    fused: &*fused,
                    q: &mut *q,
                    k: &mut *k,
                    v: &mut *v,
                    tokens: rows,
                    kv_heads: shape.0,
                    group: shape.1,
                    head_dim: HEAD_DIM,
                })
            },
        )?;
        self.row(
            &format!("join of fused heads x {rows}"),
            8 * rows * wide,
            |backend| {
                backend.join_qkv(JoinQkv {
                    fused: &mut *fused,
                    q: &*q,
                    k: &*k,
                    v: &*v,
                    tokens: rows,
                    kv_heads: shape.0,
                    group: shape.1,
                    head_dim: HEAD_DIM,
                })
            },
        )?;
        let layout = PageLayout {
            dtype: ROUND,
            kv_heads,
            head_dim: HEAD_DIM,
        };
        let bytes = rows.div_ceil(PAGE_TOKENS) * layout.page_bytes();
        let mut room = B::Room::default();
        let mut pages = self.backend.blank(&mut room, layout, bytes)?;
        self.row(
            &format!("append {kv_heads} heads x {rows}"),
            12 * rows * kv,
            |backend| {
                backend.kv_append(KvAppend {
                    keys: &*k,
                    values: &*v,
                    rows: &steps,
                    pages: &mut pages,
                })
            },
        )
    }

    /// Adapters on a square matrix, forward and back.
    pub(super) fn adapters(&mut self, rows: usize) -> Result<(), Ended> {
        let hidden = self.sizes.hidden;
        let (a, b) = (numbers(RANK * hidden), numbers(RANK * hidden));
        let (a, b) = (
            view(QuantType::None, RANK, hidden, &a)?,
            view(QuantType::None, hidden, RANK, &b)?,
        );
        let adapter = Adapter {
            a: self.backend.matrix(a)?,
            b: self.backend.matrix(b)?,
            scale: 0.5,
        };
        let adapters = self.backend.adapters(vec![Some(adapter)])?;
        let of_rows = vec![Some(0); rows];
        let (x, mut middle, mut out) = (
            self.filled(rows * hidden)?,
            self.filled(rows * RANK)?,
            self.filled(rows * hidden)?,
        );
        let bytes = 4 * RANK * hidden + 8 * rows * hidden;
        self.row(
            &format!("adapter of rank {RANK}, {hidden} x {rows}"),
            bytes,
            |backend| {
                backend.adapt(Adapt {
                    x: &*x,
                    adapters: &adapters,
                    of_rows: &of_rows,
                    middle: &mut *middle,
                    out: &mut *out,
                    round: ROUND,
                })
            },
        )?;
        self.row(
            &format!("adapter gradient {hidden} x {rows}"),
            bytes,
            |backend| {
                backend.adapt_grad(AdaptGrad {
                    grad: &*x,
                    adapters: &adapters,
                    of_rows: &of_rows,
                    middle: &mut *middle,
                    out: &mut *out,
                })
            },
        )
    }

    /// Rows by number.
    pub(super) fn gather(&mut self, rows: usize) -> Result<(), Ended> {
        let hidden = self.sizes.hidden;
        let index: Vec<u32> = (0..rows).map(|row| page(row).0).collect();
        let (x, mut out) = (self.filled(rows * hidden)?, self.filled(rows * hidden)?);
        self.row(
            &format!("gather {hidden} x {rows}"),
            8 * rows * hidden,
            |backend| {
                backend.gather(Gather {
                    x: &*x,
                    index: &index,
                    width: hidden,
                    out: &mut *out,
                })
            },
        )
    }

    /// A mixture of experts behind its router, as of a Mixtral of half the widths.
    pub(super) fn mixture(&mut self, quant: QuantType, rows: usize) -> Result<(), Ended> {
        let (hidden, middle) = (self.sizes.hidden / 2, self.sizes.middle / 2);
        let (wide, narrow) = (stored(quant, middle, hidden), stored(quant, hidden, middle));
        let mut experts = Vec::new();
        for _ in 0..EXPERTS {
            experts.push(Expert {
                gate: self.backend.matrix(view(quant, middle, hidden, &wide)?)?,
                up: self.backend.matrix(view(quant, middle, hidden, &wide)?)?,
                down: self.backend.matrix(view(quant, hidden, middle, &narrow)?)?,
            });
        }
        let experts = self.backend.experts(experts)?;
        let pairs = rows * CHOSEN;
        let x = self.filled(rows * hidden)?;
        let (mut logits, mut out) = (
            self.backend.buffer(rows * EXPERTS),
            self.filled(rows * hidden)?,
        );
        // Every token goes to two neighbours, every pair of neighbours as often.
        let scattered: Vec<f32> = (0..rows * EXPERTS)
            .map(|i| -(((i % EXPERTS + EXPERTS - i / EXPERTS * CHOSEN % EXPERTS) % EXPERTS) as f32))
            .collect();
        let (mut gate, mut up) = (self.filled(pairs * middle)?, self.filled(pairs * middle)?);
        let mut given = self.filled(pairs * hidden)?;
        let mut lists = self.backend.buffer(list_words(rows, CHOSEN, EXPERTS));
        let seconds = self.time(|backend| {
            // The weights of the experts took the place of the logits.
            backend.upload(&scattered, &mut logits)?;
            backend.mixture(Mixture {
                x: &*x,
                logits: &mut *logits,
                experts: &experts,
                adapters: None,
                tokens: rows,
                chosen: CHOSEN,
                room: ExpertsRoom {
                    gate: &mut *gate,
                    up: &mut *up,
                    given: &mut *given,
                    lists: &mut *lists,
                },
                out: &mut *out,
                round: ROUND,
            })
        })?;
        let read = EXPERTS.min(pairs) * (2 * wide.len() + narrow.len());
        self.print(
            &format!("{CHOSEN} of {EXPERTS} experts {quant} {hidden} x {rows}"),
            seconds,
            read,
            6 * pairs * hidden * middle,
        )?;
        let (mut grad, mut part) = (self.filled(pairs * middle)?, self.filled(pairs * hidden)?);
        let mut small = [(); 2].map(|()| self.backend.buffer(rows * EXPERTS));
        let [weights, shares] = &mut small;
        let seconds = self.time(|backend| {
            backend.upload(&scattered, &mut logits)?;
            backend.mixture_grad(MixtureGrad {
                x: &*x,
                grad: &*x,
                logits: &mut *logits,
                experts: &experts,
                adapters: None,
                tokens: rows,
                chosen: CHOSEN,
                room: ExpertsGradRoom {
                    gate: &mut *gate,
                    up: &mut *up,
                    grad: &mut *grad,
                    given: [&mut *given, &mut *part],
                    weights: &mut **weights,
                    shares: &mut **shares,
                    lists: &mut *lists,
                },
                out: &mut *out,
                round: ROUND,
            })
        })?;
        self.print(
            &format!("gradient of {CHOSEN} of {EXPERTS} experts {quant} {hidden} x {rows}"),
            seconds,
            2 * read - narrow.len() * EXPERTS.min(pairs),
            10 * pairs * hidden * middle,
        )
    }

    /// The gradients of the largest product and of attention, over a sequence of `rows` tokens.
    pub(super) fn gradients(&mut self, rows: usize) -> Result<(), Ended> {
        let (hidden, middle, kv) = (self.sizes.hidden, self.sizes.middle, self.sizes.kv);
        let (grad, mut out) = (self.filled(rows * middle)?, self.filled(rows * hidden)?);
        for quant in FORMATS {
            let bytes = stored(quant, middle, hidden);
            let matrix = self.backend.matrix(view(quant, middle, hidden, &bytes)?)?;
            let seconds = self.time(|backend| {
                backend.linear_grad(LinearGrad {
                    grad: &*grad,
                    weight: matrix.clone(),
                    out: &mut *out,
                    rows,
                })
            })?;
            let name = format!("linear gradient {quant} {hidden} <- {middle} x {rows}");
            self.print(&name, seconds, bytes.len(), 2 * rows * hidden * middle)?;
        }
        let layout = PageLayout {
            dtype: ROUND,
            kv_heads: kv / HEAD_DIM,
            head_dim: HEAD_DIM,
        };
        let tables = vec![
            (0..rows.div_ceil(PAGE_TOKENS))
                .map(page)
                .collect::<Vec<PageId>>(),
        ];
        let steps = steps(&tables, rows, 0);
        let bytes = rows.div_ceil(PAGE_TOKENS) * layout.page_bytes();
        let mut room = B::Room::default();
        let (q, fill, mut q_grad) = (
            self.filled(rows * hidden)?,
            self.filled(rows * kv)?,
            self.filled(rows * hidden)?,
        );
        let (mut k_grad, mut v_grad) = (self.filled(rows * kv)?, self.filled(rows * kv)?);
        let mut pages = self.backend.blank(&mut room, layout, bytes)?;
        self.backend.kv_append(KvAppend {
            keys: &*fill,
            values: &*fill,
            rows: &steps,
            pages: &mut pages,
        })?;
        let mut out = self.backend.buffer(rows * hidden);
        let mut logsum = self.backend.buffer(rows * hidden / HEAD_DIM);
        self.backend.attention(Attention {
            q: &*q,
            pages: &pages,
            rows: &steps,
            group: hidden / kv,
            divisor: (HEAD_DIM as f32).sqrt(),
            alibi: None,
            window: usize::MAX,
            out: &mut *out,
            logsum: Some(&mut *logsum),
        })?;
        let seconds = self.time(|backend| {
            backend.attention_grad(AttentionGrad {
                q: &*q,
                grad: &*q,
                pages: &pages,
                rows: &steps,
                starts: &[0],
                group: hidden / kv,
                divisor: (HEAD_DIM as f32).sqrt(),
                alibi: None,
                window: usize::MAX,
                known: Some(Known {
                    out: &*out,
                    logsum: &*logsum,
                }),
                q_grad: &mut *q_grad,
                k_grad: &mut *k_grad,
                v_grad: &mut *v_grad,
            })
        })?;
        // Scores again, and four products of their size.
        self.print(
            &format!("attention gradient {rows}"),
            seconds,
            bytes,
            5 * rows * (rows + 1) * hidden,
        )
    }

    /// A row that is measured by the bytes it moves.
    fn row(
        &mut self,
        name: &str,
        bytes: usize,
        run: impl FnMut(&mut B) -> Result<(), kernels::ops::OpError>,
    ) -> Result<(), Ended> {
        let seconds = self.time(run)?;
        self.print(name, seconds, bytes, 0)
    }
}

/// Bytes of a matrix, all alike: numbers of about 0.01 in every format.
pub(super) fn stored(quant: QuantType, outputs: usize, inputs: usize) -> Vec<u8> {
    vec![0x3c; quant::stored_bytes(quant, ROUND, outputs, inputs).unwrap_or(0)]
}

/// bfloat16 numbers of about 0.01.
fn numbers(count: usize) -> Vec<u8> {
    vec![0x3c; 2 * count]
}

/// `bytes` as a matrix.
pub(super) fn view(
    quant: QuantType,
    outputs: usize,
    inputs: usize,
    bytes: &[u8],
) -> Result<WeightView<'_>, Ended> {
    WeightView::quantized(quant, ROUND, outputs, inputs, bytes)
        .map_err(|failure| Ended::new(shared::exit::ExitReason::Failed, &failure))
}
