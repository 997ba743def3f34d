/* registry.c - the table of codec families: a codec exists when it has a line here. */
#include <string.h>

#include "codec_internal.h"

#define UNIFORM_OPTIONS "group=N sym asym axis=token|channel "

static const kvant_family families[] = {
    { { sizeof(kvant_codec_family), "f32", 0, 0, "", "-", "uncompressed binary32" }, kvant_create_raw },
    { { sizeof(kvant_codec_family), "f16", 0, 0, "", "-", "uncompressed binary16, the usual cache" },
      kvant_create_raw },
    { { sizeof(kvant_codec_family), "bf16", 0, 0, "", "-", "uncompressed bfloat16" }, kvant_create_raw },
    { { sizeof(kvant_codec_family), "int", 2, 8, UNIFORM_OPTIONS KVANT_TRANSFORM_OPTIONS,
        "baseline of all five papers", "uniform quantisation, per token or per channel, in groups" },
      kvant_create_int },
    { { sizeof(kvant_codec_family), "bdr", 2, 8, UNIFORM_OPTIONS KVANT_TRANSFORM_OPTIONS, "SAW-INT4, section 3",
        "block-diagonal Hadamard rotation, then per-token asymmetric int" },
      kvant_create_bdr },
    { { sizeof(kvant_codec_family), "turboquant", 1, 8, "scale=norm|unbiased " KVANT_TRANSFORM_OPTIONS,
        "TurboQuant, Algorithm 1 (mse)", "random rotation, then the Lloyd-Max codebook of its marginal" },
      kvant_create_turboquant },
};

#define N_FAMILIES (sizeof families / sizeof families[0])

const kvant_family *kvant_family_find(const char *name)
{
    for (size_t i = 0; i < N_FAMILIES; i++)
        if (strcmp(families[i].info.name, name) == 0)
            return &families[i];
    return NULL;
}

size_t kvant_codec_family_count(void)
{
    return N_FAMILIES;
}

kvant_status kvant_codec_family_get(size_t index, kvant_codec_family *family)
{
    if (!family || family->size != sizeof *family || index >= N_FAMILIES)
        return KVANT_ERR_ARGUMENT;
    *family = families[index].info;
    return KVANT_OK;
}
