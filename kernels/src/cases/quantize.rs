//! Quantization: a device makes the bytes that the host makes.

use super::*;

/// (inputs, outputs): one, odd, a short last group, more than 256 groups.
const SIZES: [((usize, usize), Class); 5] = [
    ((1, 1), Class::Quick),
    ((7, 5), Class::Quick),
    ((100, 37), Class::Quick),
    ((1024, 33), Class::Full),
    ((8192, 8192), Class::Served),
];

pub(super) struct QuantizeCase {
    from: CaseMatrix,
    quant: QuantType,
}

impl QuantizeCase {
    fn all(dtype: DType, inputs: usize, outputs: usize) -> [QuantizeCase; 2] {
        let from = CaseMatrix::new(QuantType::None, dtype, inputs, outputs);
        [QuantType::Int8, QuantType::Nf4].map(|quant| QuantizeCase { from: from.clone(), quant })
    }

    fn stored(&self) -> usize {
        stored_bytes(self.quant, self.from.dtype, self.from.outputs, self.from.inputs).unwrap_or(0)
    }
}

impl Case for QuantizeCase {
    fn cases(class: Class) -> Vec<Self> {
        let of = |(inputs, outputs)| {
            DTYPES.into_iter().flat_map(move |dtype| QuantizeCase::all(dtype, inputs, outputs))
        };
        class.select(&SIZES).into_iter().flat_map(of).collect()
    }

    fn measured(shapes: &Shapes) -> Vec<Self> {
        QuantizeCase::all(DType::Bf16, shapes.hidden, shapes.middle).into()
    }

    fn operation(&self) -> &'static str {
        "quantize"
    }

    fn shape(&self) -> String {
        let CaseMatrix { dtype, inputs, outputs, .. } = &self.from;
        format!("{} of {dtype} {outputs}x{inputs}", self.quant)
    }

    fn work(&self) -> Work {
        Work::bytes(self.from.len() + self.stored())
    }

    fn run<B: Subject>(&self, bench: &mut Bench<'_, B>, _: Range<usize>) -> Outcome {
        let stored = bench.weights(self.from.len(), || self.from.bytes(false));
        let from = bench.matrix(self.from.view(stored[0]))?;
        let words = self.stored() / 4;
        let mut to = bench.output(words)?;
        bench.launch(|device, _| device.quantize(&from, self.quant, &mut to))?;
        let words = bench.take(&to, words)?;
        Ok(vec![words.iter().flat_map(|v| v.to_le_bytes()).map(f32::from).collect()])
    }
}
