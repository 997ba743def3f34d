#version 450
/* combine.comp - adds up the parts of attention.comp: one workgroup per query head. */
#extension GL_GOOGLE_include_directive : require
#include "push.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 0) const uint HEAD_DIM = 128;

layout(binding = 0) readonly buffer Parts { float parts[]; };
layout(binding = 1) writeonly buffer Out { float result[]; };

/* Parts whose factors fit the workgroup's memory. */
const uint MOST_PARTS = 1024u;

shared float factors[MOST_PARTS];
shared float lanes[64];

void main()
{
    const uint me = gl_LocalInvocationIndex, head = gl_WorkGroupID.x;
    const uint from = head * push.parts * (HEAD_DIM + 2u);
    float most = parts[from + HEAD_DIM], total = 0.0;

    for (uint i = me; i < push.parts; i += 64u)
        most = max(most, parts[from + i * (HEAD_DIM + 2u) + HEAD_DIM]);
    lanes[me] = most;
    barrier();
    for (uint i = 0u; i < 64u; i++)
        most = max(most, lanes[i]);
    barrier();
    for (uint i = me; i < push.parts; i += 64u) {
        const uint part = from + i * (HEAD_DIM + 2u) + HEAD_DIM;
        factors[i] = exp2(parts[part] - most);
        total += parts[part + 1u] * factors[i];
    }
    lanes[me] = total;
    barrier();
    total = 0.0;
    for (uint i = 0u; i < 64u; i++)
        total += lanes[i];
    for (uint c = me; c < HEAD_DIM; c += 64u) {
        vec4 sum = vec4(0.0); /* four loads at a time */
        uint at = from + c, i = 0u;
        for (; i + 4u <= push.parts; i += 4u, at += 4u * (HEAD_DIM + 2u))
            sum += vec4(parts[at], parts[at + HEAD_DIM + 2u], parts[at + 2u * (HEAD_DIM + 2u)],
                        parts[at + 3u * (HEAD_DIM + 2u)]) *
                   vec4(factors[i], factors[i + 1u], factors[i + 2u], factors[i + 3u]);
        for (; i < push.parts; i++, at += HEAD_DIM + 2u)
            sum.x += parts[at] * factors[i];
        result[head * HEAD_DIM + c] = (sum.x + sum.y + (sum.z + sum.w)) / total;
    }
}
