/* wrong.c - a kvant command whose CPU kernels are slightly wrong at one level, for the tests of
 * `kvant selftest`. The linker replaces the library's functions by these (--wrap). The environment
 * variable KVANT_WRONG names the level and the function: "avx2:encode", "c:decode",
 * "avx512:attention", ... */
#include <kvant/attention.h>
#include <kvant/codec.h>
#include <kvant/tensor.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

kvant_status __real_kvant_tensor_get_block(const kvant_tensor *tensor, uint32_t block,
                                           uint32_t kv_head, kvant_block_info *info);
kvant_status __wrap_kvant_tensor_get_block(const kvant_tensor *tensor, uint32_t block,
                                           uint32_t kv_head, kvant_block_info *info);
kvant_status __real_kvant_codec_decode(const kvant_codec *codec, const kvant_affine *affine,
                                       const void *page, uint32_t first, uint32_t n, float *rows,
                                       size_t stride);
kvant_status __wrap_kvant_codec_decode(const kvant_codec *codec, const kvant_affine *affine,
                                       const void *page, uint32_t first, uint32_t n, float *rows,
                                       size_t stride);
kvant_status __real_kvant_attention(const kvant_tensor *k, const kvant_tensor *v,
                                    const kvant_attention_problem *problem, void *workspace,
                                    size_t bytes);
kvant_status __wrap_kvant_attention(const kvant_tensor *k, const kvant_tensor *v,
                                    const kvant_attention_problem *problem, void *workspace,
                                    size_t bytes);

static bool is_wrong(const char *what)
{
    const char *wanted = getenv("KVANT_WRONG");
    const kvant_cpu_level level = kvant_get_cpu_level();
    char here[64];
    if (wanted == NULL)
        return false;
    snprintf(here, sizeof here, "%s:%s", kvant_cpu_level_name(level), what);
    return strcmp(wanted, here) == 0;
}

kvant_status __wrap_kvant_tensor_get_block(const kvant_tensor *tensor, uint32_t block,
                                           uint32_t kv_head, kvant_block_info *info)
{
    static uint8_t page[1 << 18];
    const kvant_status status = __real_kvant_tensor_get_block(tensor, block, kv_head, info);
    if (is_wrong("encode") && block == 2 && kv_head == 1) {
        kvant_codec_info codec = { .size = sizeof codec };
        kvant_codec_get_info(info->codec, &codec);
        memcpy(page, info->page, codec.page_bytes);
        page[codec.code_bytes - 1] ^= 0x80;
        info->page = page;
    }
    return status;
}

/* One number errs by the size of some roundings. */
kvant_status __wrap_kvant_codec_decode(const kvant_codec *codec, const kvant_affine *affine,
                                       const void *page, uint32_t first, uint32_t n, float *rows,
                                       size_t stride)
{
    const kvant_status status =
        __real_kvant_codec_decode(codec, affine, page, first, n, rows, stride);
    if (is_wrong("decode"))
        rows[63 * stride + 5] += 0.01f;
    return status;
}

/* Two channels of one head are exchanged. */
kvant_status __wrap_kvant_attention(const kvant_tensor *k, const kvant_tensor *v,
                                    const kvant_attention_problem *problem, void *workspace,
                                    size_t bytes)
{
    const kvant_status status = __real_kvant_attention(k, v, problem, workspace, bytes);
    if (is_wrong("attention") && problem->n_queries == 32) {
        float *out = problem->out + 31 * problem->out_token_stride + 2 * problem->out_head_stride;
        const float first = out[0];
        out[0] = out[32];
        out[32] = first;
    }
    return status;
}
