/* test_lean_codecs.c - without a GPU: the codecs of a libkvant_cuda that was built with
 * KVANT_PAPERS=OFF. libkvant may have the families of papers and open such a library. */
#include "../../src/device/memory.h"
#include "../unit/calibrated.h"
#include "../unit/testing.h"

/* The codecs that need no kernel of src/cuda/papers, by the part of the spec in front of the
 * options. Groups of kivi and innerq are groups of int. */
static bool is_served(const char *spec)
{
    static const char *const names[] = { "f32",  "f16",    "bf16",    "int-",       "bdr-",
                                         "kivi", "innerq", "hessian", "turboquant", "trellis" };
    if (strstr(spec, "qjl") || strstr(spec, ".5"))
        return false;
    for (size_t i = 0; i < COUNT(names); i++)
        if (strncmp(spec, names[i], strlen(names[i])) == 0)
            return true;
    return false;
}

/* Codecs that no libkvant_cuda serves, whatever it was built with. */
static bool is_never_served(const char *spec)
{
    return strncmp(spec, "polar-3.9", 9) == 0;
}

static void check(const kvant_codec *codec, uint32_t *served, uint32_t *refused)
{
    kvant_codec_info info = { .size = sizeof info };
    char text[300] = "";
    kvant_cuda_codec *gpu = NULL;
    assert_int_equal(kvant_codec_get_info(codec, &info), KVANT_OK);
    const bool expected = is_served(info.spec), never = is_never_served(info.spec);
    const kvant_status status = kvant_cuda_codec_unrotated(codec, &gpu, text, sizeof text);
    if (status != (expected ? KVANT_OK : KVANT_ERR_UNSUPPORTED) || (gpu != NULL) != expected ||
        (!expected && !strstr(text, never ? "not on the GPU" : "-DKVANT_PAPERS=ON")))
        fail_msg("%s: status %d, '%s'", info.spec, (int)status, text);
    *(expected ? served : refused) += 1;
    kvant_cuda_codec_free(&gpu);
}

CASE(papers_are_refused)
{
    uint32_t served = 0, refused = 0;
    for (size_t i = 0; i < COUNT(all_specs); i++)
        for (int role = 0; role < 2; role++) {
            kvant_codec *codec;
            if (kvant_codec_create(all_specs[i], 64, (kvant_role)role, 3, &codec, NULL, 0) !=
                KVANT_OK)
                continue;
            check(codec, &served, &refused);
            kvant_codec_free(&codec);
        }
    assert_true(served > 50 && (refused > 50 || !KVANT_PAPERS));
}

CASE(centroids_are_refused)
{
    uint32_t served = 0, refused = 0;
    kvant_calibration *calibration = calibrate_fixed(64);
    assert_non_null(calibration);
    for (size_t i = 0; i < N_CALIBRATED_SPECS + N_WEIGHTED_SPECS; i++) {
        const char *spec =
            i < N_CALIBRATED_SPECS ? calibrated_specs[i] : weighted_specs[i - N_CALIBRATED_SPECS];
        kvant_codec *codec;
        if (kvant_codec_create_calibrated(spec, 64, KVANT_ROLE_K, 3, calibration, 1, 0, &codec,
                                          NULL, 0) != KVANT_OK)
            continue;
        check(codec, &served, &refused);
        kvant_codec_free(&codec);
    }
    assert_true(served > 0 && (refused > 0 || !KVANT_PAPERS));
    kvant_calibration_free(&calibration);
}

RUN_CASES(NULL, NULL)
