// Says whether this processor has what the kernels were compiled for (build.rs): a folder of builds
// may come from another machine. Compiled without such instructions itself.

// What is missing, or null.
extern "C" const char* sepal_emu_lacks() {
#ifdef EMU_V3
    // Whatever has these three has the rest of x86-64-v3.
    if (!__builtin_cpu_supports("avx2")) return "AVX2";
    if (!__builtin_cpu_supports("bmi2")) return "BMI2";
    if (!__builtin_cpu_supports("fma")) return "FMA";
#endif
    return nullptr;
}
