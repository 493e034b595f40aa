//! Settings of a hosted server. They become the flags of `sepal serve`.

use std::ffi::OsString;
use std::fmt::Display;
use std::ops::Range;
use std::path::PathBuf;

use crate::server::{HostError, LogTo, Server};

/// Settings of a server that this program hosts; [`Server::builder`] makes one.
///
/// Every setter may be called again: a later single value replaces the one before, lists grow. What
/// has no setter of its own is set by [`Builder::limit`] or [`Builder::switch`] under the name of its
/// flag.
#[derive(Debug)]
#[must_use = "a server starts with `start`"]
pub struct Builder {
    model: OsString,
    devices: Vec<String>,
    tensor_parallel: Vec<String>,
    peers: Vec<String>,
    is_new_swarm: bool,
    flags: Vec<(String, Option<OsString>)>,
    log: LogTo,
}

impl Server {
    /// Settings of a server of `model`: a folder in Hugging Face layout or a repository of the Hub.
    pub fn builder(model: impl Into<OsString>) -> Builder {
        Builder {
            model: model.into(),
            devices: Vec::new(),
            tensor_parallel: Vec::new(),
            peers: Vec::new(),
            is_new_swarm: false,
            flags: Vec::new(),
            log: LogTo::default(),
        }
    }
}

impl Builder {
    /// Adds devices with a worker each: `cpu`, `cpu:N`, `cuda:N`, `cuda:GPU-UUID`. The default is every
    /// CUDA device that works, else `cpu`.
    pub fn devices<D: Into<String>>(mut self, devices: impl IntoIterator<Item = D>) -> Builder {
        self.devices.extend(devices.into_iter().map(Into::into));
        self
    }

    /// Adds devices of one group that shares every block (tensor parallelism).
    pub fn tensor_parallel_devices<D: Into<String>>(
        mut self,
        devices: impl IntoIterator<Item = D>,
    ) -> Builder {
        self.tensor_parallel.extend(devices.into_iter().map(Into::into));
        self
    }

    /// Adds peers of the swarm to join, as multiaddresses with PeerID. Without any peer and without
    /// [`Builder::new_swarm`], the server joins the public swarm.
    pub fn initial_peers<P: Into<String>>(mut self, peers: impl IntoIterator<Item = P>) -> Builder {
        self.peers.extend(peers.into_iter().map(Into::into));
        self
    }

    /// Starts a swarm of its own.
    pub fn new_swarm(mut self) -> Builder {
        self.is_new_swarm = true;
        self
    }

    /// Serves exactly these blocks. The default is as many as fit in memory, where the swarm lacks them.
    pub fn blocks(self, blocks: Range<u32>) -> Builder {
        self.limit("block_indices", format_args!("{}:{}", blocks.start, blocks.end))
    }

    /// Stores matrices as `none`, `int8` or `nf4`.
    pub fn quant_type(self, quant_type: &str) -> Builder {
        self.limit("quant_type", quant_type)
    }

    /// Names the instance, for `sepal status` and a second server of one machine.
    pub fn instance(self, name: &str) -> Builder {
        self.limit("instance", name)
    }

    /// Sets the folder of instances, in which a running server has its socket.
    pub fn runtime_dir(self, folder: impl Into<PathBuf>) -> Builder {
        self.set("runtime_dir", Some(folder.into().into_os_string()))
    }

    /// Sets the folder of prepared models.
    pub fn cache_dir(self, folder: impl Into<PathBuf>) -> Builder {
        self.set("cache_dir", Some(folder.into().into_os_string()))
    }

    /// Sets any other setting by the name of its flag, without dashes: `limit("max_batch_size", 2048)`.
    pub fn limit(self, flag: &str, value: impl Display) -> Builder {
        self.set(flag, Some(value.to_string().into()))
    }

    /// Sets a flag that takes no value: `switch("no_relay")`.
    pub fn switch(self, flag: &str) -> Builder {
        self.set(flag, None)
    }

    /// Sets where the log goes.
    pub fn log(mut self, log: LogTo) -> Builder {
        self.log = log;
        self
    }

    fn set(mut self, flag: &str, value: Option<OsString>) -> Builder {
        self.flags.retain(|(set, _)| set != flag);
        self.flags.push((flag.to_owned(), value));
        self
    }

    /// Starts the server. It ends with this program, or when the returned value is dropped.
    ///
    /// # Errors
    /// [`HostError`]: [`crate::init`] was not called, a setting is refused (the sentence of `sepal serve`
    /// for it), or the system refuses a process.
    pub fn start(self) -> Result<Server, HostError> {
        let (arguments, log) = self.into_arguments();
        Server::start(arguments, log)
    }

    /// The command line of `sepal serve` that does the same.
    fn into_arguments(self) -> (Vec<OsString>, LogTo) {
        let mut arguments: Vec<OsString> = vec!["serve".into(), "--events".into()];
        for (flag, value) in self.flags {
            let mut argument = OsString::from(format!("--{flag}"));
            if let Some(value) = value {
                // One argument: a value may begin with a dash.
                argument.push("=");
                argument.push(value);
            }
            arguments.push(argument);
        }
        if self.is_new_swarm {
            arguments.push("--new_swarm".into());
        }
        if !self.devices.is_empty() {
            arguments.push(format!("--device={}", self.devices.join(",")).into());
        }
        let lists =
            [("tensor_parallel_devices", self.tensor_parallel), ("initial_peers", self.peers)];
        for (flag, values) in lists {
            arguments.extend(values.into_iter().map(|value| format!("--{flag}={value}").into()));
        }
        // A model is never taken for a flag.
        arguments.extend(["--".into(), self.model]);
        (arguments, self.log)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(builder: Builder) -> Vec<String> {
        let text = |argument: OsString| argument.into_string().unwrap();
        builder.into_arguments().0.into_iter().map(text).collect()
    }

    #[test]
    fn settings_become_flags_and_the_last_value_counts() {
        let builder = Server::builder("-odd name")
            .blocks(0..4)
            .blocks(2..6)
            .devices(["cpu:0"])
            .devices(["cpu:1"])
            .initial_peers(["/ip4/127.0.0.1/tcp/1/p2p/Qm", "/ip4/127.0.0.1/tcp/2/p2p/Qm"])
            .switch("no_relay")
            .limit("drain_timeout", 2.5);
        assert_eq!(
            arguments(builder),
            [
                "serve",
                "--events",
                "--block_indices=2:6",
                "--no_relay",
                "--drain_timeout=2.5",
                "--device=cpu:0,cpu:1",
                "--initial_peers=/ip4/127.0.0.1/tcp/1/p2p/Qm",
                "--initial_peers=/ip4/127.0.0.1/tcp/2/p2p/Qm",
                "--",
                "-odd name",
            ]
        );
    }
}
