# Completion of yunion-mpsctl for bash. The program itself knows the words, also the names of slices and the PIDs of clients.

_yunion_mpsctl() {
    # The words up to the cursor. bash splits them at colons too, which are in the name of every slice: pieces without
    # space between them are one word again.
    local rest=${COMP_LINE:0:COMP_POINT} words=() piece trimmed i
    for ((i = 0; i <= COMP_CWORD; i++)); do
        piece=${COMP_WORDS[i]}
        trimmed=${rest#"${rest%%[![:space:]]*}"}
        # The cursor may be in the middle of the last one.
        [[ $trimmed == "$piece"* ]] || piece=$trimmed
        if [[ ${#words[@]} -gt 0 && $trimmed == "$rest" ]]; then
            words[${#words[@]} - 1]+=$piece
        else
            words+=("$piece")
        fi
        rest=${trimmed#"$piece"}
    done
    # Nothing stands before the cursor yet.
    [[ -z $rest || -n ${rest//[[:space:]]/} ]] || words+=("")
    local last=$((${#words[@]} - 1)) word

    # Behind the dashes of run stands a command of its own.
    COMPREPLY=()
    for ((i = 1; i < last; i++)); do
        [[ ${words[i]} == -- ]] || continue
        compopt -o default 2>/dev/null
        ((i + 1 < last)) || mapfile -t COMPREPLY < <(compgen -c -- "${words[last]}")
        return 0
    done

    while IFS=$'\t' read -r word _; do
        COMPREPLY+=("$word")
    done < <(yunion-mpsctl complete-words "${words[@]}" 2>/dev/null)
    # A directory goes on.
    [[ ${#COMPREPLY[@]} -ne 1 || ${COMPREPLY[0]} != */ ]] || compopt -o nospace 2>/dev/null
    # bash puts a word in the place of the last piece only.
    local breaks=${COMP_WORDBREAKS//[!:=]/}
    if [[ -n $breaks && ${words[last]} == *["$breaks"]* ]]; then
        word=${words[last]}
        word=${word%"${word##*["$breaks"]}"}
        for i in "${!COMPREPLY[@]}"; do
            COMPREPLY[i]=${COMPREPLY[i]#"$word"}
        done
    fi
}

complete -F _yunion_mpsctl yunion-mpsctl
