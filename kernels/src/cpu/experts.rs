//! A mixture of experts on the fast paths of its primitives: see [`crate::ops::experts`].

use super::Cpu;
use crate::backend::Backend;
use crate::ops::experts::{self, AdapterViews, Primitives};
use crate::ops::{
    Adapter, Expert, ExpertAdapters, LinearGrad, Lora, LoraGrad, Mixture, MixtureGrad, OpError,
    Products, SiluMul, SiluMulGrad, mixture_grad,
};
use crate::tensor::WeightView;

/// Experts and adapters as the processor has them.
type Experts<'w> = Vec<Expert<WeightView<'w>>>;
type Adapters<'w> = Vec<Option<Adapter<WeightView<'w>>>>;

impl Primitives for Cpu {
    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), OpError> {
        let len = values.len();
        Backend::all_reduce(self, &mut [values], len)
    }

    fn broadcast(&mut self, values: &mut [f32]) -> Result<(), OpError> {
        Backend::broadcast(self, values, values.len())
    }

    fn products(&mut self, args: Products<'_, '_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        Backend::products(self, args)
    }

    fn lora(&mut self, args: Lora<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        Cpu::lora(self, args)
    }

    fn silu_mul(&mut self, args: SiluMul<'_, [f32]>) -> Result<(), OpError> {
        Backend::silu_mul(self, args)
    }

    fn linear_grad(&mut self, args: LinearGrad<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        Backend::linear_grad(self, args)
    }

    fn lora_grad(&mut self, args: LoraGrad<'_, [f32], WeightView<'_>>) -> Result<(), OpError> {
        Cpu::lora_grad(self, args)
    }

    fn silu_mul_grad(&mut self, args: SiluMulGrad<'_, [f32]>) -> Result<(), OpError> {
        Backend::silu_mul_grad(self, args)
    }
}

/// Computes a mixture.
pub(super) fn mixture(
    cpu: &mut Cpu,
    args: Mixture<'_, [f32], Experts<'_>, Adapters<'_>>,
) -> Result<(), OpError> {
    let Mixture { x, logits, experts, adapters, tokens, chosen, workspace, out, round } = args;
    let (experts, adapters) = (&experts[..], adapters.map(viewed));
    let args = Mixture { x, logits, experts, adapters, tokens, chosen, workspace, out, round };
    let mut gathered = std::mem::take(&mut cpu.gathered);
    let done = experts::compose(cpu, &mut gathered, args);
    cpu.gathered = gathered;
    done
}

/// Computes the gradient of a mixture.
pub(super) fn mixture_grad(
    cpu: &mut Cpu,
    args: MixtureGrad<'_, [f32], Experts<'_>, Adapters<'_>>,
) -> Result<(), OpError> {
    let MixtureGrad { x, grad, logits, experts, adapters, tokens, chosen, workspace, out, round } =
        args;
    let (experts, adapters) = (&experts[..], adapters.map(viewed));
    let args =
        MixtureGrad { x, grad, logits, experts, adapters, tokens, chosen, workspace, out, round };
    let mut gathered = std::mem::take(&mut cpu.gathered);
    let done = mixture_grad::compose(cpu, &mut gathered, args);
    cpu.gathered = gathered;
    done
}

/// The same adapters, their tables as slices.
fn viewed<'a, 'w>(
    adapters: ExpertAdapters<'a, [f32], Adapters<'w>>,
) -> ExpertAdapters<'a, [f32], AdapterViews<'w>> {
    let ExpertAdapters { tables, count, of_tokens, middle } = adapters;
    let tables = tables.map(|table| table.map(Vec::as_slice));
    ExpertAdapters { tables, count, of_tokens, middle }
}
