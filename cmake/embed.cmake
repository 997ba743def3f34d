# embed.cmake - cmake -DOUT=file.c -DNAME=name -DFILE=file -P embed.cmake: a file as an array of
# bytes, `name` and `name_size`, which the including source declares.
file(READ ${FILE} hex HEX)
string(LENGTH "${hex}" digits)
math(EXPR size "${digits} / 2")
string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
file(WRITE ${OUT}
    "/* Made by embed.cmake. */\n#include <stddef.h>\n"
    "extern const unsigned char ${NAME}[];\nextern const size_t ${NAME}_size;\n"
    "const unsigned char ${NAME}[] = { ${bytes}0 };\nconst size_t ${NAME}_size = ${size};\n")
