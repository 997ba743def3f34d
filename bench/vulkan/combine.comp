#version 450
/* combine.comp - adds up the parts of attention.comp: one workgroup per query head. */
#extension GL_GOOGLE_include_directive : require
#include "push.glsl"

layout(local_size_x = 32) in;
layout(constant_id = 0) const uint HEAD_DIM = 128;

layout(binding = 0) readonly buffer Parts { float parts[]; };
layout(binding = 1) writeonly buffer Out { float result[]; };

void main()
{
    const uint head = gl_WorkGroupID.x, from = head * push.parts * (HEAD_DIM + 2u);
    float most = parts[from + HEAD_DIM], total = 0.0;

    for (uint i = 1u; i < push.parts; i++)
        most = max(most, parts[from + i * (HEAD_DIM + 2u) + HEAD_DIM]);
    for (uint i = 0u; i < push.parts; i++) {
        const uint part = from + i * (HEAD_DIM + 2u) + HEAD_DIM;
        total += parts[part + 1u] * exp2(parts[part] - most);
    }
    for (uint c = gl_LocalInvocationIndex; c < HEAD_DIM; c += 32u) {
        float sum = 0.0;
        for (uint i = 0u; i < push.parts; i++) {
            const uint part = from + i * (HEAD_DIM + 2u);
            sum += parts[part + c] * exp2(parts[part + HEAD_DIM] - most);
        }
        result[head * HEAD_DIM + c] = sum / total;
    }
}
