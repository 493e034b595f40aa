//! Lists the compiled kernels of `prebuilt/` and the constants that their sources export. With the
//! feature `emu` it also compiles every `cuda/*.cu` as C++, with a table of its kernels; only that
//! needs a C++ compiler.

fn main() {
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-changed=build.rs");
    images::list();
    #[cfg(feature = "emu")]
    emulator::build();
}

#[cfg(feature = "emu")]
mod emulator {
    use std::path::{Path, PathBuf};

    /// `address` or `thread` instruments the kernels; the sanitizer's library must then be
    /// preloaded by whoever runs them.
    const SANITIZE: &str = "SEPAL_EMU_SANITIZE";

    pub fn build() {
        println!("cargo:rerun-if-env-changed={SANITIZE}");
        let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
        // For tests that need a library of their own.
        println!("cargo:rustc-env=SEPAL_EMU_COMPILER={}", plain().get_compiler().path().display());
        let mut sources = sources();
        let mut build = compiler();
        // Kernels that are wrong on purpose: whether a sanitizer reports anything at all.
        if is_sanitized() {
            let path = std::fs::canonicalize("cuda/emu/faulty.cu").expect("it is there");
            sources.push(("faulty".to_owned(), path));
        }
        for (name, source) in &sources {
            let path = out.join(format!("emu_{name}.cpp"));
            write(&path, &table_of(name, source));
            build.file(path);
        }
        let tables = out.join("emu_tables.cpp");
        write(&tables, &all_tables(&sources));
        build.file(tables);
        let mut objects = build.compile_intermediates();
        objects.extend(scheduler().compile_intermediates());
        objects.extend(processor().compile_intermediates());
        cc::Build::new().cpp(true).objects(&objects).compile("sepal_emu");
        if !is_sanitized() {
            link_driver(&out, &objects);
        }
    }

    /// `driver/libcuda.so`: the functions of a driver before these kernels.
    fn link_driver(out: &Path, kernels: &[PathBuf]) {
        let folder = out.join("driver");
        std::fs::create_dir_all(&folder).expect("OUT_DIR can be written");
        let mut build = plain();
        build.file("cuda/emu/driver.cpp");
        let mut link = build.get_compiler().to_command();
        link.args(["-shared", "-pthread", "-Wl,-Bsymbolic,-soname,libcuda.so", "-o"])
            .arg(folder.join("libcuda.so"))
            .args(build.compile_intermediates())
            .args(kernels);
        let status = link.status().expect("the C++ compiler links");
        assert!(status.success(), "libcuda.so was not linked");
    }

    /// The scheduler of fibers. What it does between two of them is no race of theirs, so the
    /// thread sanitizer is told of its switches and does not look into it.
    fn scheduler() -> cc::Build {
        let mut build = match std::env::var(SANITIZE).as_deref() {
            Ok("thread") => {
                let mut build = plain();
                build.define("EMU_TSAN", "1");
                build
            }
            _ => compiler(),
        };
        build.file("cuda/emu/emulator.cpp");
        build
    }

    /// The check that kernels may run on this processor, which itself runs on any.
    fn processor() -> cc::Build {
        let mut build = portable();
        if has_v3() {
            build.define("EMU_V3", None);
        }
        build.file("cuda/emu/processor.cpp");
        build
    }

    /// The compiler of kernels, instrumented if that is asked for.
    fn compiler() -> cc::Build {
        let mut build = plain();
        match std::env::var(SANITIZE).as_deref() {
            Ok("address") => {
                build.flag("-fsanitize=address,undefined");
                println!("cargo:rustc-link-lib=dylib=asan");
                println!("cargo:rustc-link-lib=dylib=ubsan");
            }
            Ok("thread") => {
                build.flag("-fsanitize=thread");
                println!("cargo:rustc-link-lib=dylib=tsan");
            }
            _ => {}
        }
        build
    }

    fn plain() -> cc::Build {
        let mut build = portable();
        // Fused multiply-add and conversions of float16 as instructions: the same bits, in half the
        // time. The tests run where they are built; elsewhere processor.cpp says what is wrong.
        if has_v3() {
            build.flag("-march=x86-64-v3");
        }
        build
    }

    fn portable() -> cc::Build {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .std("c++17")
            .include("cuda")
            .define("CUDA_CPU", None)
            .flag("-fno-strict-aliasing")
            .flag("-ffp-contract=off")
            // The fiber that runs is asked for at every step.
            .flag("-ftls-model=initial-exec")
            .flag("-Wno-unknown-pragmas")
            .flag("-Wno-unused-function")
            .flag("-Wno-unused-parameter")
            // Arrays that unrolled loops fill.
            .flag_if_supported("-Wno-maybe-uninitialized")
            .opt_level(if is_sanitized() { 1 } else { 2 })
            .flag("-g1");
        build
    }

    #[cfg(target_arch = "x86_64")]
    fn has_v3() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("movbe")
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn has_v3() -> bool {
        false
    }

    fn is_sanitized() -> bool {
        std::env::var_os(SANITIZE).is_some_and(|kind| !kind.is_empty())
    }

    /// Name and path of each file of kernels.
    fn sources() -> Vec<(String, PathBuf)> {
        let entries = std::fs::read_dir("cuda").expect("kernels/cuda is there");
        let mut sources: Vec<(String, PathBuf)> = entries
            .map(|entry| entry.expect("an entry of kernels/cuda").path())
            .filter(|path| path.extension().is_some_and(|e| e == "cu"))
            .map(|path| {
                let name = path.file_stem().and_then(|s| s.to_str()).expect("UTF-8");
                (name.to_owned(), path.canonicalize().expect("it was just listed"))
            })
            .collect();
        sources.sort();
        sources
    }

    /// The file, then the tables of its kernels and of the constants that it exports.
    fn table_of(name: &str, source: &Path) -> String {
        let text = preprocessed(source);
        let kernels = kernels_in(&text);
        assert!(!kernels.is_empty(), "{} has no kernel", source.display());
        let entries: String = kernels
            .iter()
            .map(|(name, cluster)| format!("    EMU_KERNEL({name}, {cluster}),\n"))
            .collect();
        let exports = exports_in(&text);
        let constants: String =
            exports.iter().map(|e| format!("    {{\"{e}\", exported_{e}}},\n")).collect();
        format!(
            "#include \"{}\"\n#include \"emu/fiber.h\"\n\
             static const emu::Kernel kernels[] = {{\n{entries}}};\n\
             static const emu::Export exports[] = {{\n{constants}    {{nullptr, 0}}}};\n\
             extern const emu::Table table_{name};\n\
             const emu::Table table_{name} = {{\"{name}\", kernels, {}, exports, {}}};\n",
            source.display(),
            kernels.len(),
            exports.len()
        )
    }

    fn all_tables(sources: &[(String, PathBuf)]) -> String {
        let declared: String =
            sources.iter().map(|(n, _)| format!("extern const emu::Table table_{n};\n")).collect();
        let listed: String = sources.iter().map(|(n, _)| format!("&table_{n}, ")).collect();
        format!(
            "#include \"emu/fiber.h\"\n{declared}namespace emu {{\nextern const Table* const tables[];\nextern const unsigned table_count;\n\
             const Table* const tables[] = {{{listed}}};\nconst unsigned table_count = {};\n}}\n",
            sources.len()
        )
    }

    fn preprocessed(source: &Path) -> String {
        let text = compiler().define("EMU_SCAN", None).file(source).flag("-xc++").expand();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Names in `extern "C" emu_global_mark void NAME(`, and the sizes of their clusters, which
    /// `emu_cluster_mark(X, Y, Z)` gives before the name.
    fn kernels_in(text: &str) -> Vec<(String, String)> {
        let mut kernels = Vec::new();
        let parts: Vec<&str> = text.split("emu_global_mark").collect();
        for pair in parts.windows(2) {
            if !pair[0].trim_end().ends_with("extern \"C\"") {
                continue;
            }
            let after = pair[1].trim_start().strip_prefix("void");
            let mut after = after.expect("a kernel returns void").trim_start();
            let mut cluster = "1, 1, 1";
            if let Some(marked) = after.strip_prefix("emu_cluster_mark(") {
                (cluster, after) = marked.split_once(')').expect("the mark is closed");
            }
            let name = after.split('(').next().map(str::trim);
            kernels.push((
                name.expect("a kernel is declared as: extern \"C\" __global__ void NAME(")
                    .to_owned(),
                cluster.to_owned(),
            ));
        }
        kernels
    }

    /// Names in `constexpr uint32_t exported_NAME =`.
    fn exports_in(text: &str) -> Vec<&str> {
        let found = text.split("constexpr uint32_t exported_").skip(1);
        found.filter_map(|after| after.split([' ', '=']).next()).collect()
    }

    fn write(path: &Path, text: &str) {
        std::fs::write(path, text).expect("OUT_DIR can be written");
    }
}

/// The images of `prebuilt/`, as a table for `src/cuda/driver/images.rs`. Warns of images that are
/// older than their sources; `.ci/run test` fails on them.
mod images {
    use std::path::{Path, PathBuf};

    use serde_json::Value;

    pub fn list() {
        println!("cargo:rerun-if-changed=prebuilt");
        let text =
            std::fs::read_to_string("prebuilt/manifest.json").expect("the manifest is there");
        let manifest: Value = serde_json::from_str(&text).expect("the manifest is JSON");
        let images = manifest["images"].as_object().expect("images by name");
        let mut table = String::from("const IMAGES: &[Image] = &[\n");
        for (name, image) in images {
            let kernels = image["kernels"].as_object().expect("kernels by name");
            let names: Vec<&String> = kernels.keys().collect();
            let pack = path(&format!("prebuilt/{name}.zst"));
            table += &format!(
                "Image {{ name: {name:?}, kernels: &{names:?}, pack: include_bytes!({pack:?}) }},\n"
            );
        }
        table += "];\n";
        table += &format!("const WAITING: &[&str] = &{:?};\n", waiting(images));
        let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
        std::fs::write(out.join("images.rs"), table).expect("OUT_DIR can be written");
        std::fs::write(out.join("sizes.rs"), sizes(images)).expect("OUT_DIR can be written");
        let is_stale = |source: &PathBuf| {
            let name = source.file_stem().and_then(|s| s.to_str());
            let hash = name.and_then(|name| images.get(name)?["source"].as_str());
            hash != Some(source_hash(source).as_str())
        };
        let stale = sources().iter().filter(|source| is_stale(source)).count();
        if stale > 0 {
            println!(
                "cargo:warning={stale} images of kernels are missing or older than their sources: run kernels/prebuilt/build.py"
            );
        }
    }

    /// Kernels that wait for earlier launches, sorted: on all architectures of their image that have
    /// such a wait.
    fn waiting(images: &serde_json::Map<String, Value>) -> Vec<&str> {
        let mut all = Vec::new();
        for (kernel, uses) in
            images.values().flat_map(|image| image["kernels"].as_object()).flatten()
        {
            let uses = uses.as_object().expect("uses by architecture");
            let able = uses.iter().filter(|(of, _)| !["80", "86", "89"].contains(&of.as_str()));
            let waits: Vec<bool> = able.map(|(_, used)| used["waits"] == true).collect();
            assert!(waits.windows(2).all(|two| two[0] == two[1]), "{kernel} waits on some only");
            if waits.first() == Some(&true) {
                all.push(kernel.as_str());
            }
        }
        all.sort_unstable();
        all
    }

    /// The constants that each source exports, for `src/sizes.rs`.
    fn sizes(images: &serde_json::Map<String, Value>) -> String {
        let mut modules = String::new();
        let mut all = String::new();
        for (source, image) in images {
            let exports = image["exports"].as_object().expect("exports by name");
            if exports.is_empty() {
                continue;
            }
            modules += &format!("/// Of `{source}.cu`.\npub(crate) mod {source} {{\n");
            for (name, value) in exports {
                modules += &format!("pub(crate) const {name}: usize = {value};\n");
                all += &format!("({source:?}, {name:?}, {value}),\n");
            }
            modules += "}\n";
        }
        let doc = "/// All of them: source, name and value.";
        format!("{modules}{doc}\npub(crate) const ALL: &[(&str, &str, u32)] = &[\n{all}];\n")
    }

    fn sources() -> Vec<PathBuf> {
        let entries = std::fs::read_dir("cuda").expect("kernels/cuda is there");
        entries
            .map(|entry| entry.expect("an entry of kernels/cuda").path())
            .filter(|path| path.extension().is_some_and(|e| e == "cu"))
            .collect()
    }

    fn path(relative: &str) -> PathBuf {
        Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join(relative)
    }

    /// FNV-1a of the file and all of ours that it includes, each once, in the order of inclusion;
    /// `prebuilt/build.py` computes the same.
    fn source_hash(source: &Path) -> String {
        let mut files = Vec::new();
        closure(source.to_owned(), &mut files);
        let bytes = files.iter().flat_map(|file| std::fs::read(file).unwrap_or_default());
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        format!("{hash:016x}")
    }

    fn closure(file: PathBuf, seen: &mut Vec<PathBuf>) {
        let Ok(text) = std::fs::read_to_string(&file) else {
            return;
        };
        if seen.contains(&file) {
            return;
        }
        let folder = file.parent().map(Path::to_owned).unwrap_or_default();
        seen.push(file);
        for line in text.lines() {
            let name = line.strip_prefix("#include \"");
            let Some(name) = name.and_then(|n| n.split('"').next()) else {
                continue;
            };
            if !name.starts_with("emu/") {
                closure(folder.join(name), seen);
            }
        }
    }
}
