/* push.glsl - what all shaders get with a call; gpu_push of gpu.h has the same members. */
layout(push_constant) uniform Push {
    uvec2 page_words; /* of a page of keys, and of values */
    uint kv_heads;
    uint check; /* set_rows.comp */
    uint n_tokens, blocks, part_pages, parts;
    float scale;
} push;
