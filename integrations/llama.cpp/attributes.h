/* attributes.h - the only file of the plug-in with compiler extensions. */
#pragma once

#if !defined(__GNUC__)
#error "the llama.cpp plug-in needs GCC or Clang: it asks for its caller's address"
#endif

/* The one symbol that the shared object exports. A DLL has a list instead (libggml-kvant.map). */
#define KVP_EXPORT __attribute__((visibility("default")))

/* The address that the running function returns to. It shows which copy of ggml loads the
 * plug-in. */
#define KVP_RETURN_ADDRESS() __builtin_return_address(0)

#define KVP_PRINTF(format_index, first_argument)                                                   \
    __attribute__((format(printf, format_index, first_argument)))

/* Asks for a line of memory that is read soon. */
#define KVP_PREFETCH(address) __builtin_prefetch(address, 0, 2)

/* A hint for the CPU in a loop that waits for another thread. */
#if defined(__x86_64__) || defined(__i386__)
#define KVP_RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define KVP_RELAX() __asm__ volatile("yield" ::: "memory")
#else
#define KVP_RELAX() ((void)0)
#endif
