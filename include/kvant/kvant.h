/* kvant.h - status codes, version and CPU level: what every other kvant header builds on.
 *
 * kvant compresses the key-value cache of transformer inference and computes attention on the
 * compressed pages. Reading order: this header, cache.h (the library manages sequences), tensor.h
 * and attention.h (an engine manages blocks), scheme.h (which codec each layer has), codec.h (rows
 * <-> page bytes).
 *
 * Conventions of the whole library:
 *
 * Errors    Functions that can fail return kvant_status. Nothing prints, exits or aborts. On an
 *           error no argument is changed unless its comment says so. A comment names the errors of
 *           its function, with three exceptions that any function may return: KVANT_ERR_ARGUMENT,
 *           KVANT_ERR_MEMORY if it allocates, and KVANT_ERR_CUDA for objects on a GPU. They stand
 *           in a comment where there is more to say about them.
 * Sizes     are in elements unless named bytes. A struct with a size field is accepted from its
 *           first released size on. In a longer one, members that the library does not know have to
 *           be zero, and become zero where the library fills it.
 * Threads   Each header says which calls may run at once. Calls with n_threads above 1 share one
 *           pool of sleeping threads per process, and use at most kvant_available_cpus() threads.
 *           The pool never ends, so libkvant.so stays mapped after dlclose. If libkvant.a is linked
 *           into a program's own library, the program must not unload this library. The pool's
 *           threads block signals, so a program's handlers never run on them.
 *
 * Fork      A child may use the library and objects of its parent, if no other thread of the parent
 *           was changing them. The child starts new threads and has no executor (executor.h).
 *
 * Stack     64 KiB are enough for every call, and for the threads of an executor.
 */
#ifndef KVANT_KVANT_H
#define KVANT_KVANT_H

#include <stddef.h>
#include <stdint.h>

/* C++ sees the declarations between these macros with C linkage. */
#ifdef __cplusplus
#define KVANT_BEGIN_C extern "C" {
#define KVANT_END_C }
#else
#define KVANT_BEGIN_C
#define KVANT_END_C
#endif

KVANT_BEGIN_C

#if defined(KVANT_BUILDING) && defined(__GNUC__)
#define KVANT_API __attribute__((visibility("default")))
#else
#define KVANT_API
#endif

/* The release of this header. */
#define KVANT_VERSION_MAJOR 0
#define KVANT_VERSION_MINOR 2
#define KVANT_VERSION_PATCH 0
#define KVANT_VERSION_STRING "0.2.0"

/* Values are part of the ABI and spaced so that a new one can join its group. */
typedef enum kvant_status {
    KVANT_OK = 0,
    KVANT_ERR_ARGUMENT = 10,    /* a null pointer, a size of zero, an index out of range */
    KVANT_ERR_SPEC = 20,        /* the codec spec string is not understood */
    KVANT_ERR_UNSUPPORTED = 30, /* understood, but not available here; the message says why */
    KVANT_ERR_MEMORY = 40,      /* the allocator returned nothing */
    KVANT_ERR_NONFINITE = 50,   /* an input row holds a NaN or an infinity; nothing was written */
    KVANT_ERR_RANGE = 51,  /* a row's scale exceeds its stored type (fp16); nothing was written */
    KVANT_ERR_FULL = 60,   /* a pool has no page left */
    KVANT_ERR_FORMAT = 70, /* bytes read from outside do not follow format.md */
    KVANT_ERR_IO = 71,     /* a file could not be read or written; the message says why */
    KVANT_ERR_CUDA = 80    /* GPU: a launch failed, or there is no code for this device */
} kvant_status;

/* A constant English phrase for a status, never NULL, also for values this version does not
 * know. */
KVANT_API const char *kvant_strerror(kvant_status status);

/* One line on why the last failing call of this thread failed, "" before the first. Valid until the
 * next failing call of the thread. Calls that fail for a reason that their status tells completely
 * may leave an older message: look only after a call that says so. */
KVANT_API const char *kvant_error_message(void);

/* The version of the library that is loaded, "major.minor.patch". */
KVANT_API const char *kvant_version(void);

/* Instruction set levels. A level names a bundle of features, not one CPUID bit;
 * architecture.md lists them. Encoders write the same bytes at every level;
 * attention agrees within the bounds its kernels state. */
typedef enum kvant_cpu_level {
    KVANT_CPU_AUTO = 0,         /* the best level that this machine and this build have */
    KVANT_CPU_C = 1,            /* portable C, the reference */
    KVANT_CPU_AVX2 = 10,        /* AVX2, FMA, F16C */
    KVANT_CPU_AVX2_VNNI = 11,   /* and AVX-VNNI; a machine with AVX-512 may lack it */
    KVANT_CPU_AVX512 = 20,      /* AVX-512 F, BW, DQ, VL */
    KVANT_CPU_AVX512_VNNI = 21, /* and VNNI */
    KVANT_CPU_AVX512_VBMI = 22, /* and VBMI */
    KVANT_CPU_NEON = 40,        /* Advanced SIMD of ARMv8.0, 64 bits */
    KVANT_CPU_NEON_DOT = 41     /* and FEAT_DotProd */
} kvant_cpu_level;

/* Forces a level for the whole process. KVANT_ERR_UNSUPPORTED when the machine or the build lacks
 * it. Call it before other threads use the library; results of calls under way at that moment are
 * from either level. */
KVANT_API kvant_status kvant_set_cpu_level(kvant_cpu_level level);

/* The level in use, never KVANT_CPU_AUTO. */
KVANT_API kvant_cpu_level kvant_get_cpu_level(void);

/* "auto", "c", "avx2", "avx2vnni", "avx512", "avx512vnni", "avx512vbmi", "neon", "neondot"; NULL
 * for an unknown value. */
KVANT_API const char *kvant_cpu_level_name(kvant_cpu_level level);

/* The level of such a name. KVANT_ERR_ARGUMENT for another one, *level is then unchanged. */
KVANT_API kvant_status kvant_cpu_level_from_name(const char *name, kvant_cpu_level *level);

/* How many CPUs the calling thread can keep busy, at least 1. Two limits count: the affinity of the
 * thread (taskset, sched_setaffinity), and the CPU time of the process's control groups (docker
 * --cpus), rounded up. The affinity is read at each call, the control groups at the first call of
 * the process. This number is the default wherever a number of threads has a default. */
KVANT_API uint32_t kvant_available_cpus(void);

KVANT_END_C

#endif /* KVANT_KVANT_H */
