/* layouts.c - prints where the fields of the structs lie that Python passes to libkvant: struct, field, offset, size. */
#include <stdio.h>

#include <kvant/cuda.h>

#define FIELD(type, field)                                                                                         \
    printf("%s %s %zu %zu\n", #type, #field, offsetof(type, field), sizeof(((type *)0)->field))
#define SIZE(type) printf("%s . 0 %zu\n", #type, sizeof(type))

static void append_structs(void)
{
    SIZE(kvant_cuda_pages);
    FIELD(kvant_cuda_pages, base);
    FIELD(kvant_cuda_pages, block_stride);
    FIELD(kvant_cuda_pages, head_stride);
    SIZE(kvant_cuda_rows);
    FIELD(kvant_cuda_rows, codec);
    FIELD(kvant_cuda_rows, pages);
    FIELD(kvant_cuda_rows, rows);
    FIELD(kvant_cuda_rows, token_stride);
    FIELD(kvant_cuda_rows, head_stride);
    FIELD(kvant_cuda_rows, center);
    FIELD(kvant_cuda_rows, scale);
    FIELD(kvant_cuda_rows, weights);
    SIZE(kvant_cuda_append_args);
    FIELD(kvant_cuda_append_args, size);
    FIELD(kvant_cuda_append_args, k);
    FIELD(kvant_cuda_append_args, v);
    FIELD(kvant_cuda_append_args, type);
    FIELD(kvant_cuda_append_args, n_tokens);
    FIELD(kvant_cuda_append_args, n_kv_heads);
    FIELD(kvant_cuda_append_args, slots);
    FIELD(kvant_cuda_append_args, refused);
}

static void seal_structs(void)
{
    SIZE(kvant_cuda_seal_pages);
    FIELD(kvant_cuda_seal_pages, codec);
    FIELD(kvant_cuda_seal_pages, open);
    FIELD(kvant_cuda_seal_pages, sealed);
    SIZE(kvant_cuda_seal_args);
    FIELD(kvant_cuda_seal_args, size);
    FIELD(kvant_cuda_seal_args, k);
    FIELD(kvant_cuda_seal_args, v);
    FIELD(kvant_cuda_seal_args, n_blocks);
    FIELD(kvant_cuda_seal_args, n_kv_heads);
    FIELD(kvant_cuda_seal_args, from);
    FIELD(kvant_cuda_seal_args, to);
    FIELD(kvant_cuda_seal_args, tokens);
    FIELD(kvant_cuda_seal_args, refused);
}

static void attention_struct(void)
{
    SIZE(kvant_cuda_attention_args);
    FIELD(kvant_cuda_attention_args, size);
    FIELD(kvant_cuda_attention_args, k_codec);
    FIELD(kvant_cuda_attention_args, v_codec);
    FIELD(kvant_cuda_attention_args, k);
    FIELD(kvant_cuda_attention_args, v);
    FIELD(kvant_cuda_attention_args, k_open);
    FIELD(kvant_cuda_attention_args, v_open);
    FIELD(kvant_cuda_attention_args, block_table);
    FIELD(kvant_cuda_attention_args, table_stride);
    FIELD(kvant_cuda_attention_args, blocks_per_row);
    FIELD(kvant_cuda_attention_args, lengths);
    FIELD(kvant_cuda_attention_args, batch);
    FIELD(kvant_cuda_attention_args, n_heads);
    FIELD(kvant_cuda_attention_args, n_kv_heads);
    FIELD(kvant_cuda_attention_args, type);
    FIELD(kvant_cuda_attention_args, q);
    FIELD(kvant_cuda_attention_args, q_batch_stride);
    FIELD(kvant_cuda_attention_args, q_head_stride);
    FIELD(kvant_cuda_attention_args, out);
    FIELD(kvant_cuda_attention_args, out_batch_stride);
    FIELD(kvant_cuda_attention_args, out_head_stride);
    FIELD(kvant_cuda_attention_args, lse);
    FIELD(kvant_cuda_attention_args, scale);
    FIELD(kvant_cuda_attention_args, v_center);
    FIELD(kvant_cuda_attention_args, k_scale);
    FIELD(kvant_cuda_attention_args, v_scale);
    FIELD(kvant_cuda_attention_args, workspace);
    FIELD(kvant_cuda_attention_args, workspace_bytes);
    FIELD(kvant_cuda_attention_args, query_tokens);
    FIELD(kvant_cuda_attention_args, query_starts);
    FIELD(kvant_cuda_attention_args, q_token_stride);
    FIELD(kvant_cuda_attention_args, out_token_stride);
    FIELD(kvant_cuda_attention_args, causal);
    FIELD(kvant_cuda_attention_args, window);
    FIELD(kvant_cuda_attention_args, logit_softcap);
    FIELD(kvant_cuda_attention_args, max_bias);
    FIELD(kvant_cuda_attention_args, mask);
    FIELD(kvant_cuda_attention_args, mask_token_stride);
    FIELD(kvant_cuda_attention_args, sinks);
}

static void decode_structs(void)
{
    SIZE(kvant_cuda_decode_args);
    FIELD(kvant_cuda_decode_args, size);
    FIELD(kvant_cuda_decode_args, codec);
    FIELD(kvant_cuda_decode_args, pages);
    FIELD(kvant_cuda_decode_args, blocks);
    FIELD(kvant_cuda_decode_args, n_blocks);
    FIELD(kvant_cuda_decode_args, n_kv_heads);
    FIELD(kvant_cuda_decode_args, type);
    FIELD(kvant_cuda_decode_args, out);
    FIELD(kvant_cuda_decode_args, token_stride);
    FIELD(kvant_cuda_decode_args, head_stride);
    FIELD(kvant_cuda_decode_args, center);
    FIELD(kvant_cuda_decode_args, scale);
    FIELD(kvant_cuda_decode_args, inverse_weights);
    FIELD(kvant_cuda_decode_args, to);
    FIELD(kvant_cuda_decode_args, transformed);
}

static void info_struct(void)
{
    SIZE(kvant_codec_info);
    FIELD(kvant_codec_info, size);
    FIELD(kvant_codec_info, spec);
    FIELD(kvant_codec_info, source);
    FIELD(kvant_codec_info, head_dim);
    FIELD(kvant_codec_info, role);
    FIELD(kvant_codec_info, center);
    FIELD(kvant_codec_info, norm);
    FIELD(kvant_codec_info, sink_tokens);
    FIELD(kvant_codec_info, recent_tokens);
    FIELD(kvant_codec_info, block_tokens);
    FIELD(kvant_codec_info, bits);
    FIELD(kvant_codec_info, code_bytes);
    FIELD(kvant_codec_info, metadata_offset);
    FIELD(kvant_codec_info, metadata_bytes);
    FIELD(kvant_codec_info, page_bytes);
    FIELD(kvant_codec_info, true_bits);
    FIELD(kvant_codec_info, nominal_bits);
    FIELD(kvant_codec_info, fingerprint);
}

int main(void)
{
    append_structs();
    seal_structs();
    attention_struct();
    decode_structs();
    info_struct();
    return 0;
}
