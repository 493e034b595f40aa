//! Forward and backward through whatever servers there are, from a file to a file: for checks
//! against other implementations.
//!
//!     cargo run -p client --example gradients -- ADDRESS PREFIX BLOCKS IN.safetensors
//! OUT.safetensors
//!
//! IN has, in float32, `input` and `output_gradient` `[rows, tokens, hidden]` and, if there are
//! any, deep `prompts` `[blocks, rows, tokens, hidden]`; OUT gets `output`, `input_gradient` and
//! `prompt_gradient`. Prints the servers of the first piece.

use std::error::Error;
use std::time::Duration;

use client::batch::{backward, forward_kept};
use client::states::{Hidden, Prompts};
use client::swarm::{Swarm, SwarmConfig};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use shared::dtype::DType;

fn tensor(file: &SafeTensors<'_>, name: &str) -> Result<(Vec<usize>, Vec<u8>), Box<dyn Error>> {
    let tensor = file.tensor(name)?;
    match tensor.dtype() {
        Dtype::F32 => Ok((tensor.shape().to_vec(), tensor.data().to_vec())),
        other => Err(format!("{name} is {other:?}, not float32").into()),
    }
}

fn states(file: &SafeTensors<'_>, name: &str) -> Result<Hidden, Box<dyn Error>> {
    match tensor(file, name)? {
        (shape, bytes) if shape.len() == 3 => {
            Ok(Hidden { dtype: DType::F32, rows: shape[0], tokens: shape[1], bytes: bytes.into() })
        }
        (shape, _) => Err(format!("{name} has shape {shape:?}").into()),
    }
}

fn prompts(file: &SafeTensors<'_>) -> Result<Option<Prompts>, Box<dyn Error>> {
    if !file.names().contains(&"prompts") {
        return Ok(None);
    }
    match tensor(file, "prompts")? {
        (shape, bytes) if shape.len() == 4 => Ok(Some(Prompts {
            dtype: DType::F32,
            blocks: shape[0],
            rows: shape[1],
            tokens: shape[2],
            bytes: bytes.into(),
        })),
        (shape, _) => Err(format!("prompts have shape {shape:?}").into()),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [address, prefix, blocks, from, to] = &args[..] else {
        return Err("give ADDRESS PREFIX BLOCKS IN OUT".into());
    };
    let bytes = std::fs::read(from)?;
    let file = SafeTensors::deserialize(&bytes)?;
    let (input, gradient) = (states(&file, "input")?, states(&file, "output_gradient")?);
    let prompts = prompts(&file)?;
    let num_blocks = blocks.parse()?;
    let swarm = Swarm::join(SwarmConfig {
        initial_peers: vec![address.parse()?],
        prefix: prefix.clone(),
        num_blocks,
        startup_timeout: Duration::from_secs(60),
    })
    .await?;
    let (output, kept) = forward_kept(&swarm, 0..num_blocks, &input, prompts.as_ref()).await?;
    let got = backward(&swarm, &kept, &gradient).await?;
    for (peer, blocks) in kept.legs().next().unwrap_or_default() {
        println!("{peer} {}:{}", blocks.start, blocks.end);
    }
    swarm.leave().await;
    let mut tensors = Vec::new();
    for (name, states) in [("output", &output), ("input_gradient", &got.inputs)] {
        let states = states.to(DType::F32);
        tensors.push((name, states.shape().to_vec(), states.bytes));
    }
    if let Some(got) = &got.prompts {
        let shape = vec![got.blocks, got.rows, got.tokens, got.width()];
        tensors.push(("prompt_gradient", shape, got.to(DType::F32).bytes));
    }
    let views: Result<Vec<_>, _> = tensors
        .iter()
        .map(|(name, shape, bytes)| {
            Ok::<_, safetensors::SafeTensorError>((
                *name,
                TensorView::new(Dtype::F32, shape.clone(), bytes)?,
            ))
        })
        .collect();
    std::fs::write(to, safetensors::serialize(views?, None)?)?;
    Ok(())
}
