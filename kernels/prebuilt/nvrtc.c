// nvrtc LIBRARY SOURCE FLAG...: compiles a source with NVRTC and writes the PTX to standard output.
//
// NVRTC keeps sets that are ordered by addresses, and what it does in their order shows in the
// PTX. Here every address follows from what is asked for alone: memory comes from a fixed place,
// one piece after the other, and nothing of the system is placed at random. With the same source
// and flags the PTX has the same bytes on every machine.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HEAP       ((char*)0x200000000000)
#define HEAP_BYTES ((size_t)1 << 36)
#define MAPS       ((char*)0x300000000000)
#define PAGE       4096

// The piece before each block: its size class, the block's size being 16 << class.
struct Head {
    size_t class;
    struct Head* next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *heap, *maps = MAPS;
static struct Head* freed[40];

static void* take(size_t size, size_t alignment) {
    size_t class = 0;
    while (((size_t)16 << class) < size) class++;
    pthread_mutex_lock(&lock);
    if (!heap) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
        long at = syscall(SYS_mmap, HEAP, HEAP_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
        if ((char*)at != HEAP) _exit(3);
        heap = HEAP;
    }
    struct Head* head = alignment <= 16 ? freed[class] : NULL;
    if (head) {
        freed[class] = head->next;
    } else {
        uintptr_t at = (uintptr_t)heap + sizeof *head + alignment - 1;
        head = (struct Head*)(at / alignment * alignment) - 1;
        heap = (char*)(head + 1) + ((size_t)16 << class);
        if (heap > HEAP + HEAP_BYTES) _exit(3);
    }
    pthread_mutex_unlock(&lock);
    head->class = class;
    return head + 1;
}

void* malloc(size_t size) { return take(size, 16); }

void free(void* block) {
    if (!block) return;
    struct Head* head = (struct Head*)block - 1;
    pthread_mutex_lock(&lock);
    head->next = freed[head->class];
    freed[head->class] = head;
    pthread_mutex_unlock(&lock);
}

void* calloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) return NULL;
    return memset(take(bytes, 16), 0, bytes);
}

void* realloc(void* block, size_t size) {
    size_t had = block ? (size_t)16 << ((struct Head*)block - 1)->class : 0;
    if (block && size <= had) return block;
    void* larger = take(size, 16);
    if (block) memcpy(larger, block, had);
    free(block);
    return larger;
}

int posix_memalign(void** block, size_t alignment, size_t size) {
    *block = take(size, alignment < 16 ? 16 : alignment);
    return 0;
}

void* aligned_alloc(size_t alignment, size_t size) { return take(size, alignment); }
void* memalign(size_t alignment, size_t size) { return take(size, alignment); }

void* mmap(void* at, size_t size, int access, int flags, int file, off_t offset) {
    if (!at) {
        pthread_mutex_lock(&lock);
        at = maps;
        maps += (size + 2 * PAGE - 1) / PAGE * PAGE;
        pthread_mutex_unlock(&lock);
    }
    return (void*)syscall(SYS_mmap, at, size, access, flags, file, offset);
}

typedef void* Program;
static void* library;

static void* function(const char* name) {
    void* found = dlsym(library, name);
    if (found) return found;
    fprintf(stderr, "%s\n", dlerror());
    exit(2);
}

static char* text(const char* what, Program program) {
    char name[64];
    size_t size = 0;
    snprintf(name, sizeof name, "%sSize", what);
    ((int (*)(Program, size_t*))function(name))(program, &size);
    char* buffer = calloc(size + 1, 1);
    ((int (*)(Program, char*))function(what))(program, buffer);
    return buffer;
}

int main(int count, char** arguments) {
    int persona = personality(0xffffffff);
    if (!(persona & ADDR_NO_RANDOMIZE) && personality(persona | ADDR_NO_RANDOMIZE) != -1) {
        char* environment[] = {NULL};
        execve("/proc/self/exe", arguments, environment);
    }
    static char source[1 << 22];
    FILE* file = count > 2 ? fopen(arguments[2], "r") : NULL;
    library = count > 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    if (!file || !library) {
        fprintf(stderr, "nvrtc: %s\n", file ? dlerror() : strerror(errno));
        return 2;
    }
    if (fread(source, 1, sizeof source, file) == sizeof source) {
        fprintf(stderr, "nvrtc: %s has more than %zu bytes\n", arguments[2], sizeof source - 1);
        return 2;
    }
    Program program = NULL;
    int (*create)(Program*, const char*, const char*, int, void*, void*) =
        function("nvrtcCreateProgram");
    int (*compile)(Program, int, char**) = function("nvrtcCompileProgram");
    const char* slash = strrchr(arguments[2], '/');
    create(&program, source, slash ? slash + 1 : arguments[2], 0, NULL, NULL);
    if (compile(program, count - 3, arguments + 3) != 0) {
        fputs(text("nvrtcGetProgramLog", program), stderr);
        return 1;
    }
    fputs(text("nvrtcGetPTX", program), stdout);
    return 0;
}
