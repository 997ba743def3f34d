# bash completion for kvant, made by `kvant completion bash`
_kvant()
{
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} command= words= values= i
    local specs="f32 f16 bf16 int-2 int-3 int-4 int-5 int-6 int-7 int-8 bdr-2 bdr-3 bdr-4 bdr-5 bdr-6 bdr-7 bdr-8 kivi-2 kivi-3 kivi-4 kivi-5 kivi-6 kivi-7 kivi-8 innerq-base innerq-hybrid innerq-small kmeans-2 kmeans-3 kmeans-4 kmeans-5 kmeans-6 kmeans-7 kmeans-8 hessian-2 hessian-3 hessian-4 hessian-5 hessian-6 hessian-7 hessian-8 turboquant-1 turboquant-2 turboquant-2.5 turboquant-3 turboquant-3.5 turboquant-4 turboquant-5 turboquant-6 turboquant-7 turboquant-8 trellis-2 trellis-3 trellis-4 polar-2 polar-3 polar-3.9 polar-4 octopus-1 octopus-2 octopus-3 octopus-4 octopus-5 hqmq-s24r3 hqmq-s24r4 hqmq-s48r4 hqmq-s96r4 hqmq-s192r4 hqmq-s192r6 naive-2 naive-3 naive-4 naive-5 naive-6 naive-7 spherical-r4jl4 addvq-k24r3 addvq-k48r4 addvq-k192r4"
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
        --cpu) ((i++)) ;;
        -*) [[ -z $command ]] || break ;;
        *) command=${command:+$command }${COMP_WORDS[i]}
           [[ $command == bench || $command == help ]] || break ;;
        esac
    done
    # Files complete the words after --, which are the program of exec and its arguments.
    [[ " ${COMP_WORDS[*]:0:COMP_CWORD} " != *" -- "* ]] || return 0
    case $prev in
    --preset | --metric) values="quality balanced small tiny" ;;
    --config | --calibration | -m | --model | -f | --file | --resume | --values | -o | --output | --sensitivity | --library | --report-text | --allow | --centroids | --report) values="files" ;;
    -k | --codec-k | -v | --codec-v | --protect-codec | --codec | --try-k | --try-v) values="specs" ;;
    --protect | -t | --threads | -p | --prompt | -n | --predict | -c | --ctx | --temp | --top-k | --top-p | --seed | --from | --chunks | --spread | --skip | -b | --batch | --by-position | --needles | -r | --trials | --longest | -d | --depth | --prefill | --decode | --rounds | --levels | --head-dim | -g | --gqa | --tokens | -q | --queries | --kv-heads | --heads | --query-tokens | --device | --table | --positions | --clusters | --sample | --layers | --bits | --kv-bytes | --probe-ctx | --probe-chunks | --exact | --neighbors | --probe | --rerank | --train | --shared-memory) values="nothing" ;;
    --stock) values="f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl" ;;
    --runtime | --base-cache) values="dirs" ;;
    esac
    case $command in
    "") words="exec run eval needle report bench calibrate capture tune inspect state search codecs selftest plugin-path completion --version --help --cpu"; [[ $prev == --cpu ]] && words="auto c avx2 avx2vnni avx512 avx512vnni avx512vbmi neon neondot" ;;
    help) words="exec run eval needle report bench calibrate capture tune inspect state search codecs selftest plugin-path completion" ;;
    bench) words="model attention cuda encode distortion" ;;
    completion) words="bash zsh fish" ;;
    "exec") words="--preset --config -k --codec-k -v --codec-v --protect --protect-codec --calibration --accel --verbose --quiet --help" ;;
    "run") words="-m --model --preset --config -k --codec-k -v --codec-v --stock --accel --fp32 --protect --protect-codec --calibration -t --threads --runtime --verbose -p --prompt -f --file -n --predict -c --ctx --temp --top-k --top-p --seed --raw --help" ;;
    "eval") words="-m --model --preset --config -k --codec-k -v --codec-v --stock --accel --fp32 --protect --protect-codec --calibration -t --threads --runtime --verbose -f --file -c --ctx --from --chunks --spread --skip -b --batch --by-position --resume --base-cache --values --wide --json --csv --help" ;;
    "needle") words="-m --model --preset --config -k --codec-k -v --codec-v --stock --accel --fp32 --protect --protect-codec --calibration -t --threads --runtime --verbose -f --file -c --ctx -n --needles -r --trials --seed --resume --json --help" ;;
    "report") words="-m --model --preset --config -k --codec-k -v --codec-v --stock --accel --fp32 --protect --protect-codec --calibration -t --threads --runtime --verbose -f --file -o --output --from -c --ctx --chunks --longest --sensitivity --quick --json --help"
        case $prev in
        --from) values="files" ;;
        esac ;;
    "bench model") words="-m --model --preset --config -k --codec-k -v --codec-v --stock --accel --fp32 --protect --protect-codec --calibration -t --threads --runtime --verbose -d --depth -p --prefill -n --decode -r --rounds --json --help" ;;
    "bench attention") words="-k --codec-k -v --codec-v --stock --levels -d --head-dim -g --gqa -n --tokens -q --queries --kv-heads -t --threads -r --rounds --runtime --json --help" ;;
    "bench cuda") words="-k --codec-k -v --codec-v -b --batch --heads --kv-heads -d --head-dim -n --tokens --query-tokens -r --rounds --device --library --json --help" ;;
    "bench encode") words="-k --codec -d --head-dim --calibration -r --rounds --json --help" ;;
    "bench distortion") words="-k --codec -t --table --quick --json --help" ;;
    "calibrate") words="-m --model -f --file -o --output -n --tokens -c --ctx --positions --clusters --sample --seed --json -t --threads --runtime --verbose --help" ;;
    "capture") words="-m --model -f --file -o --output -n --tokens -c --ctx --spread --layers --queries --json -t --threads --runtime --verbose --help" ;;
    "tune") words="-m --model -f --file --bits --kv-bytes -c --ctx -o --output --calibration --report-text --probe-ctx --probe-chunks --chunks --resume --try-k --try-v --json -t --threads --runtime --verbose --help" ;;
    "inspect") words="-m --model -c --ctx --gpu --exact --preset --config -k --codec-k -v --codec-v --stock --protect --protect-codec --calibration --runtime --verbose -f --file --json --help" ;;
    "search") words="-c --codec -m --metric --device --allow -k --neighbors --probe --centroids --rerank --train --batch -n --queries -t --threads --verify --json --help"
        case $prev in
        -c) values="specs" ;;
        -m | --device) values="quality balanced small tiny" ;;
        -k) values="nothing" ;;
        esac ;;
    "codecs") words="-a --all -d --head-dim --config --json --help" ;;
    "selftest") words="--report -c --codec --no-speeds --shared-memory --json --help"
        case $prev in
        -c) values="specs" ;;
        esac ;;
    esac
    case $values in
    files) return ;;
    dirs) mapfile -t COMPREPLY < <(compgen -d -- "$cur") ;;
    specs) mapfile -t COMPREPLY < <(compgen -W "$specs" -- "$cur") ;;
    nothing) COMPREPLY=() ;;
    *) mapfile -t COMPREPLY < <(compgen -W "${values:-$words}" -- "$cur") ;;
    esac
}
complete -o default -F _kvant kvant
