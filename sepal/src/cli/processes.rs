//! Flags of the processes that `sepal` starts of itself, and of `selftest`, which is one of them.

use std::path::PathBuf;

use clap::Args;
use shared::block::Span;
use shared::config::{Device, ProbeConfig};
use shared::control::Role;
use shared::warpgroups::WarpgroupKernel;

use super::{Command, values};

#[derive(Debug, Args)]
pub struct SelftestArgs {
    /// Device to test: cuda:N, cpu (measured only), or emu:N in builds with the emulator
    #[arg(long, default_value = "cuda:0", value_parser = values::device)]
    device: Device,

    /// Run only the smallest cases: whether kernels load and give correct results
    #[arg(long)]
    quick: bool,

    /// Also write everything that is found to FILE, as JSON, to be sent in
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    /// End with this process, the parent
    #[arg(long, value_name = "PID", hide = true)]
    parent: Option<u32>,

    /// Kernels for warpgroups not to launch
    #[arg(long, value_delimiter = ',', value_parser = values::warpgroup_kernel, hide = true)]
    skip: Vec<WarpgroupKernel>,
}

impl SelftestArgs {
    /// What is asked for.
    pub fn command(self) -> Command {
        Command::SelfTest {
            device: self.device,
            is_quick: self.quick,
            report: self.report,
            parent: self.parent,
            skipped: self.skip.into_iter().collect(),
        }
    }
}

#[derive(Debug, Args)]
pub struct CudaDevicesArgs {
    /// The process that waits for the answer
    #[arg(long)]
    parent: u32,
}

impl CudaDevicesArgs {
    /// What is asked for.
    pub fn command(self) -> Command {
        Command::CudaDevices { parent: self.parent }
    }
}

#[derive(Debug, Args)]
pub struct SampleArgs {
    /// Number of the CUDA device
    #[arg(long)]
    ordinal: u32,
    /// Kernels for warpgroups to compare
    #[arg(long, value_delimiter = ',', value_parser = values::warpgroup_kernel, required = true)]
    kernels: Vec<WarpgroupKernel>,
    /// The process that waits for the answer
    #[arg(long)]
    parent: u32,
}

impl SampleArgs {
    /// What is asked for.
    pub fn command(self) -> Command {
        Command::Sample {
            ordinal: self.ordinal,
            kernels: self.kernels.into_iter().collect(),
            parent: self.parent,
        }
    }
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ProbeArgs {
    /// Addresses of the server
    #[arg(long, num_args = 1.., required = true)]
    peers: Vec<String>,
    /// Prefix under which it announces the model
    #[arg(long)]
    dht_prefix: String,
    /// Its blocks
    #[arg(long)]
    blocks: Span,
    /// Width of the hidden states
    #[arg(long)]
    hidden_size: u32,
    /// The process that waits for the outcome
    #[arg(long)]
    parent: u32,
}

impl ProbeArgs {
    /// What is asked for.
    pub fn command(self) -> Command {
        Command::Probe(ProbeConfig {
            peers: self.peers,
            dht_prefix: self.dht_prefix,
            blocks: self.blocks.start().0..self.blocks.end().0,
            hidden_size: self.hidden_size,
            parent: self.parent,
        })
    }
}

#[derive(Debug, Args)]
pub struct RoleArgs {
    /// Descriptor inherited from the supervisor
    #[arg(long)]
    bootstrap: i32,
}

impl RoleArgs {
    /// What is asked for.
    pub fn command(self, role: Role) -> Command {
        Command::Role { role, bootstrap: self.bootstrap }
    }
}
