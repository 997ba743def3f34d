/* mock_control.h - reads from the mock's GPU library what its last calls were given
 * (cuda/host/host.h). Include it after cmocka.h. */
#ifndef KVANT_TESTS_MOCK_CONTROL_H
#define KVANT_TESTS_MOCK_CONTROL_H

#include <dlfcn.h>
#include <string.h>

#include "../cuda/host/host.h"

static inline host_control *mock_control(void)
{
    host_control_fn *control;
    void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), HOST_CONTROL_FUNCTION);

    assert_non_null(symbol);
    memcpy(&control, &symbol, sizeof(symbol));
    return control();
}

/* The arguments of the last attention in a graph. */
static inline const kvant_cuda_kernel_attention_args *last_attention(void)
{
    assert_int_equal(mock_control()->attention.size, sizeof(kvant_cuda_kernel_attention_args));
    return &mock_control()->attention;
}

static inline unsigned long standin_count(const char *name)
{
    unsigned long (*count)(void);
    void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);

    assert_non_null(symbol);
    memcpy(&count, &symbol, sizeof(symbol));
    return count();
}

/* How often this thread waited for a stream of the GPU. */
static inline unsigned long standin_waits(void)
{
    return standin_count("host_waits");
}

/* How often other threads copied from the GPU to memory that CUDA does not know. */
static inline unsigned long standin_unknown_copies(void)
{
    return standin_count("host_unknown_copies");
}

/* Blocks that this thread sealed as a whole, each with keys and values of a layer. */
static inline unsigned long standin_sealed(void)
{
    return standin_count("host_sealed");
}

/* Launches that were captured into graphs which are gone and were never launched. */
static inline unsigned long standin_unlaunched(void)
{
    return standin_count("host_unlaunched");
}

#endif
