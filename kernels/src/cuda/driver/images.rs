//! The compiled kernels inside the executable, `kernels/prebuilt/*.zst`: PTX and one cubin per
//! architecture for each `.cu` (see `build.py` there). A device takes the cubin made for it, else
//! that of an earlier minor version of its architecture, else the driver compiles the PTX. An
//! image without PTX has kernels for some architectures only.

use std::collections::HashMap;
use std::io::Read;

use super::calls as cu;

use super::error::check;
use crate::cuda::gpu::GpuError;

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The images of one `.cu`.
struct Image {
    name: &'static str,
    kernels: &'static [&'static str],
    pack: &'static [u8],
}

/// Largest unpacked image: far above what any has, far below what hurts.
const MAX_BYTES: u64 = 256 << 20;

/// Every kernel, ready to be launched.
pub(super) struct Kernels {
    functions: HashMap<&'static str, cu::CUfunction>,
    /// What the images are for.
    pub(super) source: String,
}

/// Whether a kernel waits for all earlier launches by itself (`pdl_wait` in `pdl.cuh`), on devices
/// that have such a wait.
pub(crate) fn waits(kernel: &str) -> bool {
    WAITING.binary_search(&kernel).is_ok()
}

/// Names of all kernels that the images have.
pub fn names() -> impl Iterator<Item = &'static str> {
    IMAGES.iter().flat_map(|image| image.kernels).copied()
}

impl Kernels {
    /// Loads every image for a device of `architecture` (compute capability × 10) into the current
    /// context.
    pub(super) fn load(architecture: u32, shared_bytes: u32) -> Result<Kernels, GpuError> {
        let mut functions = HashMap::new();
        let mut source = String::new();
        for image in IMAGES {
            let sections = unpack(image.pack).ok_or(GpuError::NoKernel(image.name))?;
            let Some((name, bytes)) = choose(&sections, architecture) else {
                continue;
            };
            name.clone_into(&mut source);
            let module = load(bytes)?;
            for kernel in image.kernels {
                functions.insert(*kernel, function(module, kernel, shared_bytes)?);
            }
        }
        Ok(Kernels { functions, source })
    }

    /// Whether these images wait where [`waits`] says so: those of compute capability 9.0 and later,
    /// but not PTX, which is for 8.0.
    pub(super) fn wait(&self) -> bool {
        let number = self.source.trim_start_matches("sm_").trim_end_matches('a').parse::<u32>();
        number.is_ok_and(|architecture| architecture >= 90)
    }

    pub(super) fn find(&self, name: &'static str) -> Result<cu::CUfunction, GpuError> {
        let found = self.functions.get(name).copied();
        found.ok_or(GpuError::NoKernel(name))
    }
}

/// The name and the bytes of each section of a pack; `None` for bytes that are no pack.
fn unpack(pack: &[u8]) -> Option<Vec<(String, Vec<u8>)>> {
    let decoder = ruzstd::decoding::StreamingDecoder::new(pack).ok()?;
    let mut bytes = Vec::new();
    decoder.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    let mut rest = bytes.as_slice();
    let mut take = |count: usize| {
        let (taken, others) = rest.split_at_checked(count)?;
        rest = others;
        Some(taken)
    };
    let number = |bytes: &[u8]| bytes.try_into().ok().map(u32::from_le_bytes);
    let count = number(take(4)?)?;
    let mut sections = Vec::new();
    for _ in 0..count {
        let name_bytes = number(take(4)?)? as usize;
        let data_bytes = number(take(4)?)? as usize;
        let name = String::from_utf8(take(name_bytes)?.to_vec()).ok()?;
        sections.push((name, take(data_bytes)?.to_vec()));
    }
    Some(sections)
}

/// Architectures of systems on a chip (Jetson Orin and Thor), which run no cubin made for desktop
/// devices of the same major version. Source: NVIDIA, "CUDA C++ Programming Guide", binary
/// compatibility.
const INTEGRATED: [u32; 2] = [87, 101];

/// The section for an architecture.
fn choose(sections: &[(String, Vec<u8>)], architecture: u32) -> Option<(&str, &[u8])> {
    let exact = [format!("sm_{architecture}"), format!("sm_{architecture}a")];
    // A cubin runs on later minor versions of the same major one; one for "a" runs on no other.
    let earlier = (architecture / 10 * 10..architecture).rev().map(|minor| format!("sm_{minor}"));
    let earlier = earlier.filter(|_| !INTEGRATED.contains(&architecture));
    exact
        .into_iter()
        .chain(earlier)
        .chain(["ptx".to_owned()])
        .find_map(|wanted| sections.iter().find(|(name, _)| *name == wanted))
        .map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
}

fn load(bytes: &[u8]) -> Result<cu::CUmodule, GpuError> {
    // PTX is text and ends with a zero for the driver.
    let mut image = bytes.to_vec();
    image.push(0);
    let mut module = std::ptr::null_mut();
    // SAFETY: a cubin or text that ends with zero, made by our own build; the driver copies it.
    let status = unsafe { cu::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
    check("cuModuleLoadData", status)?;
    Ok(module)
}

/// A kernel of a module, allowed as much shared memory as a CTA may have beside what it declares.
fn function(
    module: cu::CUmodule,
    name: &'static str,
    shared_bytes: u32,
) -> Result<cu::CUfunction, GpuError> {
    let text = std::ffi::CString::new(name).map_err(|_| GpuError::NoKernel(name))?;
    let mut function = std::ptr::null_mut();
    // SAFETY: a module that was loaded, and a C string.
    let status = unsafe { cu::cuModuleGetFunction(&raw mut function, module, text.as_ptr()) };
    check("cuModuleGetFunction", status)?;
    let mut own: i32 = 0;
    let attribute = cu::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    // SAFETY: writes one int to a place for one.
    let status = unsafe { cu::cuFuncGetAttribute(&raw mut own, attribute, function) };
    check("cuFuncGetAttribute", status)?;
    let dynamic = i32::try_from(shared_bytes).unwrap_or(0).saturating_sub(own);
    use cu::CUfunction_attribute as Attribute;
    for (attribute, value) in [
        (Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic),
        (Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CARVEOUT_PERCENT),
    ] {
        // SAFETY: a function of a loaded module.
        let status = unsafe { cu::cuFuncSetAttribute(function, attribute, value) };
        check("cuFuncSetAttribute", status)?;
    }
    Ok(function)
}

/// Share of a multiprocessor's memory that is shared memory instead of L1 cache: the most that the
/// device has. The driver's own choice may leave room for one CTA where two fit, such as two of 97
/// KiB on an H200. All kernels prefer the same share, because a multiprocessor drains before it
/// changes the share, so that a launch could not begin beside the end of the one before it. Kernels
/// stream weights, keys and values past L1.
const CARVEOUT_PERCENT: i32 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    /// Images of kernels that use what other architectures do not have.
    const HOPPER_ONLY: [&str; 5] =
        ["attention_wgmma", "linear_cluster", "linear_wgmma", "peak_wgmma", "wgmma"];

    #[test]
    fn every_image_has_a_cubin_for_each_architecture_and_its_kernels_in_the_ptx() {
        assert!(!IMAGES.is_empty());
        for image in IMAGES {
            let sections = unpack(image.pack).unwrap();
            let is_for_hopper = HOPPER_ONLY.contains(&image.name);
            for architecture in [80, 86, 89, 90, 100, 120] {
                let chosen = choose(&sections, architecture);
                if is_for_hopper && architecture != 90 {
                    assert_eq!(chosen, None, "{}", image.name);
                    continue;
                }
                let (name, bytes) = chosen.unwrap();
                assert!(name.starts_with(&format!("sm_{architecture}")), "{name}");
                assert!(bytes.starts_with(b"\x7fELF"), "{}: {name}", image.name);
            }
            if is_for_hopper {
                continue;
            }
            let (_, ptx) = sections.iter().find(|(name, _)| name == "ptx").unwrap();
            let ptx = String::from_utf8(ptx.clone()).unwrap();
            for kernel in image.kernels {
                assert!(ptx.contains(&format!(".entry {kernel}(")), "{kernel}");
            }
        }
    }

    #[test]
    fn the_nearest_image_that_runs_is_chosen() {
        let sections: Vec<_> = ["ptx", "sm_80", "sm_86", "sm_90a", "sm_100"]
            .map(|name| (name.to_owned(), Vec::new()))
            .into();
        let chosen = |architecture| choose(&sections, architecture).unwrap().0;
        assert_eq!(chosen(80), "sm_80");
        assert_eq!(chosen(89), "sm_86");
        assert_eq!(chosen(90), "sm_90a");
        assert_eq!(chosen(103), "sm_100");
        assert_eq!(chosen(120), "ptx");
    }

    #[test]
    fn integrated_devices_take_ptx_instead_of_a_desktop_cubin() {
        for image in IMAGES.iter().filter(|image| !HOPPER_ONLY.contains(&image.name)) {
            let sections = unpack(image.pack).unwrap();
            for architecture in INTEGRATED {
                assert_eq!(choose(&sections, architecture).unwrap().0, "ptx", "{}", image.name);
            }
        }
        let own = [("ptx".to_owned(), Vec::new()), ("sm_87".to_owned(), Vec::new())];
        assert_eq!(choose(&own, 87).unwrap().0, "sm_87");
    }

    #[test]
    fn launches_start_early_with_cubins_that_wait_only() {
        let wait =
            |source: &str| Kernels { functions: HashMap::new(), source: source.to_owned() }.wait();
        assert!(["sm_90a", "sm_100", "sm_120"].into_iter().all(wait));
        assert!(!["sm_80", "sm_89", "ptx"].into_iter().any(wait));
        assert!(["rmsnorm_bf16", "rmsnorm_add_bf16", "attention_join"].into_iter().all(waits));
        assert!(!["rope_table_bf16", "convert_f32_bf16"].into_iter().any(waits));
    }

    #[test]
    fn a_pack_that_is_cut_short_is_none() {
        let pack = IMAGES[0].pack;
        assert!(unpack(&pack[..pack.len() / 2]).is_none());
        assert!(unpack(b"nonsense").is_none());
    }
}
