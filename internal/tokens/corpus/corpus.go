// Package corpus generates the texts over which this project's tokenizers are compared with the reference: prose and code in
// several scripts, the awkward corners of Unicode and white space, special tokens, and fuzz. It is a generator with fixed seeds so
// that the repository holds digests only, not the texts.
//
// The tests of internal/tokens and the golden writer in test/interop/tokens call it. Its output depends on nothing outside its
// source: a change here needs new goldens.
package corpus

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"strings"
)

// Digest is how the goldens state ids: how many, and the 64-bit FNV-1a hash of them as little-endian 32-bit words.
func Digest(ids []uint32) string {
	h := fnv.New64a()
	var b [4]byte
	for _, id := range ids {
		binary.LittleEndian.PutUint32(b[:], id)
		_, _ = h.Write(b[:]) // never fails
	}
	return fmt.Sprintf("%d %016x", len(ids), h.Sum64())
}

// Texts returns the corpus, always the same.
func Texts() []string {
	texts := append([]string{}, hand...)
	rng := rand.New(rand.NewPCG(2026, 9))
	for _, script := range scripts {
		for range 20 {
			texts = append(texts, prose(rng, script, 20+rng.IntN(200)))
		}
	}
	for range 40 {
		texts = append(texts, goCode(rng), pythonCode(rng), jsonText(rng))
	}
	texts = append(texts, codePoints()...)
	texts = append(texts, normalForms()...)
	for range 2000 {
		texts = append(texts, fuzz(rng))
	}
	return append(texts, long(rng)...)
}

var hand = []string{
	"", " ", "  ", "\n", "\r\n", "\t", "a", " a", "a ", "  a", "\x00", "a\x00b", "\x00\x01\x02 \x7f",
	"Hello, world! It's 2026-11-29 and 3.14159 != 22/7; don't you'll we've I'M they'RE he'D 'S 's's 'll'LL",
	"don't DON'T Don'T it'ſ 'ſ 'ſa 'K it's's'sun 'tis 'twas rock'n'roll l'été d'accord",
	"   leading", "trailing   ", "a   b", "a \n b", "a\n\n\nb", "a\r\n\r\nb", "a \r\n \r\n b", "\n \n a", " \n", "\t\t\tx\t y\t\n",
	"a\u00a0b \u00a0c \u2003\u2003d \u3000e\u0085f\u2028g\u2029h\u200bi\u180ej\ufeffk",
	"1 12 123 1234 12345 1234567890 ١٢٣٤ ४५६७ ½¾ Ⅷ ² ①②③ 1,234.5e-6",
	"HTTPServer XMLHttpRequest camelCase PascalCase snake_case SCREAMING_CASE kebab-case iPhone McDonald ǅ ǅungla ǈ ǲ",
	"e\u0301 é n\u0303 ñ A\u030a Å Å ﬁ ｈａｌｆ ½ 가 가 각 ᄀ\u1161\u11a8",
	"a" + strings.Repeat("\u0301", 40) + "b",
	"e" + strings.Repeat("\u0323\u0301", 25) + " x\u0301\u0323\u0300 q\u0307\u0323",
	"\u0301leading mark \u0301 \u0301\u0301 A\u0301B \u0301AB \u0301ab a\u0301B !\u0301! 1\u0301",
	"नमस्ते दुनिया, यह एक परीक्षण है। क्षत्रिय ज्ञान", "مرحبا بالعالم، هذا اختبار. ١٢٣ مُحَمَّد", "שלום עולם", "สวัสดีชาวโลก", "Привет, мир! Ёлка", "Γειά σου Κόσμε",
	"你好，世界！这是一个测试。深度学习模型的推理服务需要考虑前缀缓存。", "こんにちは世界。これはテストです。カタカナ・ーひらがな漢字ゟヿ゛゜ ゛か゛", "안녕하세요 세계",
	"中文abc中文123中文 中文\n中文!中文。a中b1中", "漢字仮名交じり文ABCと123とﾊﾝｶｸ", "龥龦龧 一丁 \u3040\u3097 ゠ヿ・ー",
	"👍👩‍👩‍👧‍👦🏳️‍🌈👋🏽 🇩🇪🇫🇷 ☺️❤️‍🔥 a👍b 1👍2", "\U0001F9D1\u200d\U0001F4BB\ufe0f #️⃣ *️⃣",
	"<|endoftext|>", "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
	"<|im_start|><|im_start|>", "<|im_start|", "<|im_start|>x<|im_en", " <|im_end|> ", "<<|im_end|>>", "<think>\n\n</think>\n\n<tool_call>{\"a\":1}</tool_call>",
	"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|reserved_special_token_1|><|reserved_special_token_10|>",
	"<|start|>system<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>ok<|return|><|call|>",
	"<｜begin▁of▁sentence｜>hi<｜User｜>question<｜Assistant｜>answer<｜end▁of▁sentence｜><think>a</think> <｜tool▁calls▁begin｜><｜place▁holder▁no▁1｜><｜place▁holder▁no▁12｜>",
	"e\u0301<|im_end|>\u0301<|im_end|>e", "a<think>b</think>\u0301",
	"https://example.com/a/b?c=d&e=f#g /usr/local/bin//x\n//comment/\n/* */ path\\to\\file a//\nb/\r\n/",
	"!!!???...,,,;;;:::---___===+++***&&&^^^%%%$$$###@@@~~~``` \"quoted\" 'single' (paren) [brack] {brace} <angle>",
	"_abc .com #tag @user $x %y ^z &amp; *p (q -r =s +t [u {v |w \\x :y ;z <a >b ,c ?d /e ~f `g !h \"i 'j }k ]l )m .café _été",
	"\u00ad\u200d\u200e\u2060a \u200d\u200db \u00ad1 \u0378\u0379\u0380 \ue000\uf8ffx \U000f0000y \U000e0001z\U0010ffff",
	"x \u0600\u06dd \u070f\u08e2 \U000110bd ﹢＋‒–—―‖‗‘’‚‛“”„‟†‡•‣․‥…‧‰‱′″‴ ©®™°±×÷€£¥₹₿",
}

// scripts are word lists of languages, with what joins their words.
var scripts = []struct {
	words string
	join  string
}{
	{"the of and to in is that it for was on are as with his they at be this from have or by one had not but what all were when your can said there use an each which she do how their if will up other about out many then them these so some her would make like him into time has look two more write go see number no way could people my than first water been call who oil its now find long down day did get come made may part", " "},
	{"der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er hat dass sie nach wird bei einer um am sind noch wie einem über einen Straße Größe schön Häuser Übung", " "},
	{"le la les de des du et est un une dans que qui pour pas sur plus avec ce il être à été où déjà l'homme qu'il c'est d'une n'est élève façon œuvre", " "},
	{"и в не на я быть он с что а по это она этот к но они мы весь который из у от так же для год человек время рука дело жизнь день голова друг дом слово место", " "},
	{"的 一 是 不 了 在 人 有 我 他 这 个 们 中 来 上 大 为 和 国 地 到 以 说 时 要 就 出 会 可 也 你 对 生 能 而 子 那 得 于 着 下 自 之 年 过 发 后 作 里 模型 推理 缓存 路由 服务器 深度学习 人工智能", ""},
	{"の に は を た が で て と し れ さ ある いる も する から な こと として い や れる など なっ ない この ため その あっ よう また もの という あり まで られ なる へ か だ これ によって により おり より による ず なり 東京 日本語 サーバー キャッシュ モデル", ""},
	{"이 그 저 것 수 등 들 및 에서 그리고 하지만 사람 시간 나라 세계 모델 서버 토큰 안녕하세요 감사합니다", " "},
	{"في من على إلى عن أن هذا هذه التي الذي كان قد لا ما هو هي مع كل بعد بين حتى عند لم مُحَمَّد كِتَاب", " "},
	{"है के में की को से का और पर यह हैं एक ने कि भी था लिए कर इस हो नहीं तो ही या गया किया जा थे साथ अपने", " "},
	{"และ ใน ที่ การ เป็น ของ ได้ ไม่ มี ให้ จะ ว่า กับ ความ นี้ ไป มา จาก แต่", ""},
	{"😀 😂 👍 ❤️ 🔥 👩‍💻 🏳️‍🌈 👋🏽 🇯🇵 🎉 ✨ 🤔 ok yes", " "},
}

func prose(rng *rand.Rand, script struct{ words, join string }, n int) string {
	words := strings.Fields(script.words)
	var b strings.Builder
	for i := range n {
		if i > 0 {
			b.WriteString(script.join)
		}
		w := words[rng.IntN(len(words))]
		if rng.IntN(12) == 0 {
			w = strings.ToUpper(w)
		}
		b.WriteString(w)
		switch rng.IntN(25) {
		case 0:
			b.WriteString(". ")
		case 1:
			b.WriteString(",")
		case 2:
			b.WriteString("。")
		case 3:
			b.WriteString("\n\n")
		case 4:
			fmt.Fprintf(&b, " %d", rng.IntN(100000))
		case 5:
			b.WriteString("?!")
		case 6:
			b.WriteString("…")
		}
	}
	return b.String()
}

var names = strings.Fields("ctx err req resp tokens index count buf key value HTTPServer parseURL worker_id maxBatchSize i x node32 UTF8")

func name(rng *rand.Rand) string { return names[rng.IntN(len(names))] }

func goCode(rng *rand.Rand) string {
	var b strings.Builder
	fmt.Fprintf(&b, "// %s returns the %s.\nfunc (%s *%s) %s(%s []byte) (int, error) {\n", name(rng), name(rng), name(rng), name(rng), name(rng), name(rng))
	for range 3 + rng.IntN(20) {
		switch rng.IntN(5) {
		case 0:
			fmt.Fprintf(&b, "\tif err := %s.%s(%s, %#x); err != nil {\n\t\treturn 0, fmt.Errorf(\"%s %%q: %%w\", %s, err)\n\t}\n", name(rng), name(rng), name(rng), rng.Uint32(), name(rng), name(rng))
		case 1:
			fmt.Fprintf(&b, "\tfor %s := range %s[%d:] {\n\t\t%s += %s<<%d | 0x%X\n\t}\n", name(rng), name(rng), rng.IntN(99), name(rng), name(rng), rng.IntN(64), rng.Uint64())
		case 2:
			fmt.Fprintf(&b, "\tswitch %s {\n\tcase '%c', '\\n':\n\t\t%s--\n\tdefault:\n\t}\n", name(rng), 'a'+rune(rng.IntN(26)), name(rng))
		case 3:
			fmt.Fprintf(&b, "\t%s := map[string]%s{\"%s\": nil, `%s`: &%s{}}\n\n", name(rng), name(rng), name(rng), name(rng), name(rng))
		case 4:
			fmt.Fprintf(&b, "\t/* %s */ _ = %s // %s\n", name(rng), name(rng), name(rng))
		}
	}
	b.WriteString("\treturn n, nil\n}\n")
	return b.String()
}

func pythonCode(rng *rand.Rand) string {
	var b strings.Builder
	fmt.Fprintf(&b, "class %s(nn.Module):\n    def __init__(self, %s=None, *args, **kwargs):\n        super().__init__()\n", name(rng), name(rng))
	for range 3 + rng.IntN(20) {
		switch rng.IntN(4) {
		case 0:
			fmt.Fprintf(&b, "        self.%s = {%q: %d, '%s': %g}\r\n", name(rng), name(rng), rng.IntN(1000), name(rng), rng.Float64())
		case 1:
			fmt.Fprintf(&b, "        for %s in range(%d):\n            if %s is not None and %s != '':\n                yield %s[%s:-1]\n", name(rng), rng.IntN(1<<20), name(rng), name(rng), name(rng), name(rng))
		case 2:
			fmt.Fprintf(&b, "        # %s'll do, it's %s\n        x = f\"{%s!r:>%d}\"\n", name(rng), name(rng), name(rng), rng.IntN(99))
		case 3:
			fmt.Fprintf(&b, "        \"\"\"%s\n\n        :param %s: the %s\n        \"\"\"\n", name(rng), name(rng), name(rng))
		}
	}
	return b.String()
}

func jsonText(rng *rand.Rand) string {
	var b strings.Builder
	indent := []string{"", "  ", "\t"}[rng.IntN(3)]
	b.WriteString("{\n")
	for range 2 + rng.IntN(15) {
		fmt.Fprintf(&b, "%s\"%s\": [%d, %g, \"%s\\n\\u00e9\", true, null, {\"%s\":-%d}],\n", indent, name(rng), rng.IntN(1<<30), rng.NormFloat64(), name(rng), name(rng), rng.IntN(100))
	}
	b.WriteString("}\n")
	return b.String()
}

// codePoints puts every code point of the scripts in use next to letters, digits, spaces and itself, which shows the class that a
// tokenizer has it in. Large blocks whose members are all alike are sampled.
func codePoints() []string {
	var texts []string
	var b strings.Builder
	n := 0
	add := func(r rune) {
		fmt.Fprintf(&b, "a%cb A%cB%c1 %c%c!%c \n", r, r, r, r, r, r)
		if n++; n%256 == 0 {
			texts = append(texts, b.String())
			b.Reset()
		}
	}
	for r := rune(1); r <= 0x2FFFF; r++ {
		alike := 0x3400 <= r && r < 0x4DC0 || 0x4E00 <= r && r < 0x9F80 || 0xAC00 <= r && r < 0xD780 || 0xE000 <= r && r < 0xF900 ||
			0x17000 <= r && r < 0x18700 || 0x1FA00 < r && r < 0x2F800 || 0x2FA20 <= r
		if 0xD800 <= r && r < 0xE000 || alike && r%97 != 0 {
			continue
		}
		add(r)
	}
	for r := rune(0xE0000); r < 0xE0200; r++ {
		add(r)
	}
	return append(texts, b.String())
}

// normalForms puts the characters of all scripts with combining marks among marks of other classes, and letters before marks that
// they compose with: what normal form C orders and composes.
func normalForms() []string {
	var texts []string
	var b strings.Builder
	add := func(s string) {
		b.WriteString(s)
		if b.Len() > 4000 {
			texts = append(texts, b.String())
			b.Reset()
		}
	}
	for _, block := range [][2]rune{{0x300, 0x3100}, {0xA600, 0xAB00}, {0xFB00, 0xFE30}, {0x101F0, 0x10400}, {0x10A00, 0x12000}, {0x16A00, 0x17000},
		{0x1D100, 0x1D250}, {0x1E000, 0x1E960}, {0x2F800, 0x2FA20}} {
		for r := block[0]; r < block[1]; r++ {
			add(fmt.Sprintf("a\u0315%c\u0300\u0323\u0301x", r))
		}
	}
	for _, letters := range [][2]rune{{'A', 'Z'}, {'a', 'z'}, {0xC0, 0x17F}, {0x391, 0x3C9}, {0x410, 0x44F}, {0x1E00, 0x1EFF}, {0x1F00, 0x1FFC}} {
		for r := letters[0]; r <= letters[1]; r++ {
			for _, m := range "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030c\u0323\u0327\u0328\u0331\u0313\u0345" {
				add(string([]rune{r, m}))
			}
		}
	}
	return append(texts, b.String()+"\u0915\u093c\u09c7\u09be\u0b47\u0b56\u3046\u3099\u30cf\u309a\u1100\u1161\u11a8\u1112\u1175\u11c2\u1101\u11a8"+
		"\U000105D2\u0307\U00011382\U000113C9\U00016121\U0001611E\U00016D67\U00016D67\U00011935\U00011930\U000110A5\U000110BA\U0001D157\U0001D165")
}

// atoms are what fuzz strings are made of, chosen to meet at every rule of the patterns.
var atoms = []string{
	" ", " ", "  ", "\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u0085", "\u2028", "a", "b", "the", "Word", "ABC", "Ab", "aB", "é", "e\u0301", "\u0301", "\u0323",
	"ǅ", "ʰ", "ª", "ß", "ſ", "K", "1", "12", "1234", "²", "Ⅷ", "٣", "'", "'s", "'S", "'ll", "'re", "’s", "n't", "!", "?", ".", ",", "-", "_", "/", "//", "\\", "\"", "(", ")", "{", "}", "[", "]", "<", ">", "|", "<|", "|>", "#", "$", "+", "=", "~", "`",
	"中", "文", "龥", "龦", "か", "ア", "ー", "・", "゛", "\u3040", "가", "각", "ᄀ", "\u1161", "ن", "ُ", "क", "्", "ष", "ก", "ำ", "я", "Ж", "Σ", "ς",
	"😀", "👩", "\u200d", "\ufe0f", "🏽", "🇩", "\x00", "\x01", "\x7f", "\u200b", "\ufeff", "\u00ad", "\u0378", "\ue000", "\U000f0000", "\U0010ffff", "…", "。", "，", "“", "€", "©", "½",
	"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<|eot_id|>", "<|begin_of_text|>", "<|start|>", "<|end|>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<｜",
}

func fuzz(rng *rand.Rand) string {
	var b strings.Builder
	for range 1 + rng.IntN(60) {
		a := atoms[rng.IntN(len(atoms))]
		if rng.IntN(40) == 0 {
			a = string(rune(1 + rng.IntN(0xD7FF)))
		}
		for range 1 + rng.IntN(2)*rng.IntN(4) {
			b.WriteString(a)
		}
	}
	return b.String()
}

// long returns texts with words far beyond the short-word path.
func long(rng *rand.Rand) []string {
	chinese := []rune("的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里")
	var zh, letters, marks strings.Builder
	for range 3000 {
		zh.WriteRune(chinese[rng.IntN(len(chinese))])
		letters.WriteByte('a' + byte(rng.IntN(26)))
		marks.WriteString([]string{"!", "=", "-", "*", "/", "#"}[rng.IntN(6)])
	}
	return []string{
		strings.Repeat("a", 5000), strings.Repeat(" ", 5000), strings.Repeat("\n", 3000), strings.Repeat("ab", 3000), strings.Repeat("=", 3000),
		strings.Repeat("哈", 2000), strings.Repeat("0", 2000), strings.Repeat(" \n", 1000), strings.Repeat("\t", 500) + "x", strings.Repeat("的一", 1500),
		zh.String(), letters.String(), strings.ToUpper(letters.String()), marks.String(), strings.Repeat("é", 1000), strings.Repeat("e\u0301", 1000), strings.Repeat("👍", 500),
	}
}
