# Completion of yunion-mpsctl for bash. The program itself provides the words, including the names of slices and the PIDs of
# clients.

_yunion_mpsctl() {
    # The words up to the cursor. bash splits them at colons too, and the name of every slice has one: pieces without space
    # between them are joined again.
    local rest=${COMP_LINE:0:COMP_POINT} words=() piece trimmed i
    for ((i = 0; i <= COMP_CWORD; i++)); do
        piece=${COMP_WORDS[i]}
        trimmed=${rest#"${rest%%[![:space:]]*}"}
        # The cursor may be within the last word.
        [[ $trimmed == "$piece"* ]] || piece=$trimmed
        if [[ ${#words[@]} -gt 0 && $trimmed == "$rest" ]]; then
            words[${#words[@]} - 1]+=$piece
        else
            words+=("$piece")
        fi
        rest=${trimmed#"$piece"}
    done
    # There is no word before the cursor yet.
    [[ -z $rest || -n ${rest//[[:space:]]/} ]] || words+=("")
    local last=$((${#words[@]} - 1)) word

    # After the dashes of run comes another command.
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
    # After a directory, the word is not complete.
    [[ ${#COMPREPLY[@]} -ne 1 || ${COMPREPLY[0]} != */ ]] || compopt -o nospace 2>/dev/null
    # bash replaces only the last piece by the chosen word.
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
