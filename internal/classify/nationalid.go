package classify

import "bytes"

// How much a valid number says by itself, by the share of random numbers of the
// same form that pass.
const (
	weak   = iota // one in ten or so
	medium        // a few in a hundred
	strong        // a few in a thousand, or less
)

// nationalID is one kind of identity number. Digits only, unless form is given.
type nationalID struct {
	name     string
	min, max int // digits
	strength int
	// groups are usual groups of digits, such as "324" for 078-05-1120: with them a weak number counts as strong.
	groups []string
	valid  func(d []byte) bool
	// context only: no checksum, or a format that is everywhere.
	needsContext bool
}

// digitIDs are those that consist of digits. Sources: the issuing authorities'
// descriptions; checked against generated and published test numbers.
var digitIDs = []nationalID{
	{name: "us-ssn", min: 9, max: 9, strength: weak, groups: []string{"324"}, needsContext: true, valid: func(d []byte) bool {
		a := num(d[:3])
		return a != 0 && a != 666 && a < 900 && num(d[3:5]) != 0 && num(d[5:]) != 0
	}},
	{name: "us-itin", min: 9, max: 9, strength: weak, groups: []string{"324"}, needsContext: true, valid: func(d []byte) bool {
		g := num(d[3:5])
		return d[0] == '9' && (g >= 50 && g <= 65 || g >= 70 && g <= 88 || g >= 90 && g <= 92 || g >= 94)
	}},
	{name: "us-npi", min: 10, max: 10, strength: weak, valid: func(d []byte) bool {
		return (d[0] == '1' || d[0] == '2') && luhn(append([]byte("80840"), d...))
	}},
	{name: "us-aba", min: 9, max: 9, strength: weak, valid: func(d []byte) bool {
		p := num(d[:2])
		return (p <= 12 && p > 0 || p >= 21 && p <= 32 || p >= 61 && p <= 72 || p == 80) && weighted(d, 3, 7, 1, 3, 7, 1, 3, 7, 1)%10 == 0
	}},
	{name: "us-ein", min: 9, max: 9, strength: weak, needsContext: true, valid: func(d []byte) bool { return num(d[:2]) > 0 }},
	{name: "uk-nhs", min: 10, max: 10, strength: weak, groups: []string{"334"}, valid: func(d []byte) bool {
		return d[0] != '0' && weighted(d, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)%11 == 0
	}},
	{name: "uk-utr", min: 10, max: 10, strength: weak, valid: func(d []byte) bool {
		return "21987654321"[weighted(d[1:], 6, 7, 8, 9, 10, 5, 4, 3, 2)%11] == d[0]
	}},
	{name: "ca-sin", min: 9, max: 9, strength: weak, groups: []string{"333"}, valid: func(d []byte) bool { return d[0] != '0' && d[0] != '8' && luhn(d) }},
	{name: "au-tfn", min: 9, max: 9, strength: weak, groups: []string{"333"}, valid: func(d []byte) bool { return weighted(d, 1, 4, 3, 7, 5, 8, 6, 9, 10)%11 == 0 }},
	{name: "au-medicare", min: 10, max: 11, strength: medium, groups: []string{"451", "4511"}, valid: func(d []byte) bool {
		return d[0] >= '2' && d[0] <= '6' && weighted(d, 1, 3, 7, 9, 1, 3, 7, 9)%10 == int(d[8]-'0') && d[9] != '0'
	}},
	{name: "au-abn", min: 11, max: 11, strength: medium, groups: []string{"2333"}, valid: func(d []byte) bool {
		return d[0] != '0' && (weighted(d, 10, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19)-10)%89 == 0
	}},
	{name: "nz-ird", min: 8, max: 9, strength: weak, groups: []string{"333", "233"}, valid: nzIRD},
	{name: "de-tax-id", min: 11, max: 11, strength: medium, groups: []string{"2333"}, valid: func(d []byte) bool {
		var n [10]int
		for _, b := range d[:10] {
			n[b-'0']++
		}
		repeated, missing := 0, 0
		for _, c := range n {
			if c > 1 {
				repeated++
			}
			if c == 0 {
				missing++
			}
		}
		return d[0] != '0' && repeated == 1 && missing <= 2 && mod11x10(d)
	}},
	{name: "fr-nir", min: 15, max: 15, strength: strong, valid: func(d []byte) bool {
		m := num(d[3:5])
		return (d[0] == '1' || d[0] == '2' || d[0] == '7' || d[0] == '8') && (m >= 1 && m <= 12 || m >= 20 && m <= 42 || m >= 50) && 97-num(d[:13])%97 == num(d[13:])
	}},
	{name: "pt-nif", min: 9, max: 9, strength: weak, groups: []string{"333"}, valid: func(d []byte) bool {
		return d[0] != '0' && d[0] != '4' && d[0] != '7' && (11-weighted(d, 9, 8, 7, 6, 5, 4, 3, 2)%11)%11%10 == int(d[8]-'0')
	}},
	{name: "nl-bsn", min: 8, max: 9, strength: weak, valid: func(d []byte) bool {
		if len(d) == 8 {
			d = append([]byte{'0'}, d...)
		}
		return num(d) > 0 && weighted(d, 9, 8, 7, 6, 5, 4, 3, 2, -1)%11 == 0
	}},
	{name: "be-nn", min: 11, max: 11, strength: strong, groups: []string{"22232"}, valid: func(d []byte) bool {
		m := num(d[2:4])
		if m %= 20; m > 12 || num(d[4:6]) > 31 {
			return false
		}
		n, c := num(d[:9]), num(d[9:])
		return 97-n%97 == c || 97-(2000000000+n)%97 == c
	}},
	{name: "at-svnr", min: 10, max: 10, strength: medium, groups: []string{"46"}, valid: func(d []byte) bool {
		return d[0] != '0' && num(d[6:8]) <= 15 && num(d[4:6]) <= 31 && num(d[4:6]) > 0 &&
			weighted(d, 3, 7, 9, 0, 5, 8, 4, 2, 1, 6)%11 == int(d[3]-'0')
	}},
	{name: "ch-ahv", min: 13, max: 13, strength: strong, groups: []string{"3442"}, valid: func(d []byte) bool {
		return num(d[:3]) == 756 && ean(d)
	}},
	{name: "pl-pesel", min: 11, max: 11, strength: medium, valid: func(d []byte) bool {
		return validDate(num(d[:2]), num(d[2:4])%20, num(d[4:6])) && weighted(d, 1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1)%10 == 0
	}},
	{name: "pl-nip", min: 10, max: 10, strength: weak, groups: []string{"3322", "3223"}, valid: func(d []byte) bool {
		return d[0] != '0' && weighted(d, 6, 5, 7, 2, 3, 4, 5, 6, 7)%11 == int(d[9]-'0')
	}},
	{name: "cz-rc", min: 10, max: 10, strength: medium, groups: []string{"64"}, valid: func(d []byte) bool {
		m := num(d[2:4])
		if m > 50 {
			m -= 50
		}
		if m > 20 {
			m -= 20
		}
		return validDate(num(d[:2]), m, num(d[4:6])) && (num(d)%11 == 0 || num(d[:9])%11 == 10 && d[9] == '0')
	}},
	{name: "hu-taj", min: 9, max: 9, strength: weak, groups: []string{"333"}, valid: func(d []byte) bool {
		return weighted(d, 3, 7, 3, 7, 3, 7, 3, 7)%10 == int(d[8]-'0')
	}},
	{name: "ro-cnp", min: 13, max: 13, strength: strong, valid: func(d []byte) bool {
		c := weighted(d, 2, 7, 9, 1, 4, 6, 3, 5, 8, 2, 7, 9) % 11
		return d[0] != '0' && ymd(d[1:7]) && c%10+c/10 == int(d[12]-'0')
	}},
	{name: "bg-egn", min: 10, max: 10, strength: medium, valid: func(d []byte) bool {
		return validDate(num(d[:2]), num(d[2:4])%20, num(d[4:6])) && num(d[2:4]) <= 52 && weighted(d, 2, 4, 8, 5, 10, 9, 7, 3, 6)%11%10 == int(d[9]-'0')
	}},
	{name: "hr-oib", min: 11, max: 11, strength: weak, valid: mod11x10},
	{name: "yu-jmbg", min: 13, max: 13, strength: strong, valid: func(d []byte) bool {
		c := 11 - weighted(d, 7, 6, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2)%11
		if c > 9 {
			c = 0
		}
		y := num(d[4:7])
		return validDate(0, num(d[2:4]), num(d[:2])) && (y >= 880 || y < 100) && c == int(d[12]-'0')
	}},
	{name: "gr-afm", min: 9, max: 9, strength: weak, valid: func(d []byte) bool {
		return num(d) > 0 && weighted(d, 256, 128, 64, 32, 16, 8, 4, 2)%11%10 == int(d[8]-'0')
	}},
	{name: "gr-amka", min: 11, max: 11, strength: medium, valid: func(d []byte) bool { return dmy(d) && luhn(d) }},
	{name: "se-pnr", min: 10, max: 12, strength: medium, groups: []string{"64", "84"}, valid: func(d []byte) bool {
		switch len(d) {
		case 12:
			if c := num(d[:2]); c < 18 || c > 20 {
				return false
			}
			d = d[2:]
		case 11:
			return false
		}
		return validDate(num(d[:2]), num(d[2:4]), (num(d[4:6])-1)%60+1) && luhn(d)
	}},
	{name: "no-fnr", min: 11, max: 11, strength: strong, groups: []string{"65"}, valid: func(d []byte) bool {
		day, month := num(d[:2]), num(d[2:4])
		if day > 40 {
			day -= 40
		}
		if month > 40 {
			month -= 40
		}
		return validDate(0, month, day) && weighted(d, 3, 7, 6, 1, 8, 9, 4, 5, 2, 1)%11 == 0 && weighted(d, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2, 1)%11 == 0
	}},
	{name: "dk-cpr", min: 10, max: 10, strength: weak, groups: []string{"64"}, needsContext: true, valid: dmy},
	{name: "ee-lt-id", min: 11, max: 11, strength: medium, valid: func(d []byte) bool {
		c := weighted(d, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1) % 11
		if c == 10 {
			c = weighted(d, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3) % 11 % 10
		}
		return d[0] >= '1' && d[0] <= '8' && ymd(d[1:7]) && c == int(d[10]-'0')
	}},
	{name: "lv-pk", min: 11, max: 11, strength: medium, groups: []string{"65"}, valid: func(d []byte) bool {
		return (dmy(d) || num(d[:2]) == 32) && (1+weighted(d, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9))%11%10 == int(d[10]-'0')
	}},
	{name: "tr-tckn", min: 11, max: 11, strength: medium, valid: func(d []byte) bool {
		odd := weighted(d, 1, 0, 1, 0, 1, 0, 1, 0, 1)
		even := weighted(d, 0, 1, 0, 1, 0, 1, 0, 1)
		return d[0] != '0' && ((odd*7-even)%10+10)%10 == int(d[9]-'0') && (odd+even+int(d[9]-'0'))%10 == int(d[10]-'0')
	}},
	{name: "il-id", min: 9, max: 9, strength: weak, valid: func(d []byte) bool { return num(d) > 0 && luhn(d) }},
	{name: "za-id", min: 13, max: 13, strength: strong, groups: []string{"6412", "64111"}, valid: func(d []byte) bool {
		return ymd(d) && d[10] <= '2' && luhn(d)
	}},
	{name: "in-aadhaar", min: 12, max: 12, strength: weak, groups: []string{"444"}, valid: func(d []byte) bool { return d[0] >= '2' && verhoeff(d) }},
	{name: "cn-rid", min: 18, max: 18, strength: strong, valid: func(d []byte) bool { return cnRID(d, d[17]) }},
	{name: "jp-mynumber", min: 12, max: 12, strength: weak, groups: []string{"444"}, valid: func(d []byte) bool {
		r := weighted(d, 6, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2) % 11
		if r <= 1 {
			return d[11] == '0'
		}
		return 11-r == int(d[11]-'0')
	}},
	{name: "kr-rrn", min: 13, max: 13, strength: strong, groups: []string{"67"}, valid: func(d []byte) bool {
		return ymd(d) && (11-weighted(d, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5)%11)%10 == int(d[12]-'0')
	}},
	{name: "th-id", min: 13, max: 13, strength: weak, groups: []string{"14521"}, valid: func(d []byte) bool {
		return d[0] >= '1' && d[0] <= '8' && (11-weighted(d, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2)%11)%10 == int(d[12]-'0')
	}},
	{name: "my-nric", min: 12, max: 12, strength: medium, groups: []string{"624"}, needsContext: true, valid: ymd},
	{name: "br-cpf", min: 11, max: 11, strength: medium, groups: []string{"3332"}, valid: func(d []byte) bool {
		return !same(d) && brCheck(weighted(d, 10, 9, 8, 7, 6, 5, 4, 3, 2)) == d[9] && brCheck(weighted(d, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2)) == d[10]
	}},
	{name: "br-cnpj", min: 14, max: 14, strength: medium, groups: []string{"23342"}, valid: func(d []byte) bool {
		return !same(d) && brCheck(weighted(d, 5, 4, 3, 2, 9, 8, 7, 6, 5, 4, 3, 2)) == d[12] && brCheck(weighted(d, 6, 5, 4, 3, 2, 9, 8, 7, 6, 5, 4, 3, 2)) == d[13]
	}},
	{name: "ar-cuit", min: 11, max: 11, strength: medium, groups: []string{"281"}, valid: func(d []byte) bool {
		switch num(d[:2]) {
		case 20, 23, 24, 25, 26, 27, 30, 33, 34:
		default:
			return false
		}
		c := 11 - weighted(d, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2)%11
		if c == 11 {
			c = 0
		}
		return c == int(d[10]-'0')
	}},
	{name: "cl-rut", min: 8, max: 9, strength: weak, groups: []string{"2331", "1331", "81", "71"}, valid: func(d []byte) bool {
		return d[0] != '0' && clRUT(d[:len(d)-1]) == d[len(d)-1]
	}},
	{name: "uy-ci", min: 8, max: 8, strength: weak, groups: []string{"1331", "71"}, valid: func(d []byte) bool {
		return (10-weighted(d, 2, 9, 8, 7, 6, 3, 4)%10)%10 == int(d[7]-'0')
	}},
	{name: "ec-ci", min: 10, max: 10, strength: medium, valid: func(d []byte) bool {
		p := num(d[:2])
		return (p >= 1 && p <= 24 || p == 30) && d[2] < '6' && luhn(d)
	}},
	// A HETU whose check is a digit; others are among letterIDs.
	{name: "fi-hetu", min: 10, max: 10, strength: medium, groups: []string{"64"}, valid: func(d []byte) bool {
		return dmy(d) && "0123456789ABCDEFHJKLMNPRSTUVWXY"[num(d[:9])%31] == d[9]
	}},
	{name: "ru-inn", min: 12, max: 12, strength: medium, valid: func(d []byte) bool {
		return num(d[:2]) > 0 && weighted(d, 7, 2, 4, 10, 3, 5, 9, 4, 6, 8)%11%10 == int(d[10]-'0') && weighted(d, 3, 7, 2, 4, 10, 3, 5, 9, 4, 6, 8)%11%10 == int(d[11]-'0')
	}},
	{name: "ru-snils", min: 11, max: 11, strength: medium, groups: []string{"3332"}, valid: func(d []byte) bool {
		return num(d[:9]) > 1001998 && weighted(d, 9, 8, 7, 6, 5, 4, 3, 2, 1)%101%100 == num(d[9:])
	}},
	{name: "kz-iin", min: 12, max: 12, strength: medium, valid: func(d []byte) bool {
		c := weighted(d, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11) % 11
		if c == 10 {
			c = weighted(d, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2) % 11
		}
		return ymd(d) && d[6] >= '1' && d[6] <= '6' && c == int(d[11]-'0')
	}},
}

func same(d []byte) bool { return bytes.Count(d, d[:1]) == len(d) }

func ean(d []byte) bool {
	sum := 0
	for i, b := range d {
		sum += int(b-'0') * (1 + 2*((len(d)-1-i)%2))
	}
	return sum%10 == 0
}

func brCheck(s int) byte {
	if r := s % 11; r >= 2 {
		return byte('0' + 11 - r)
	}
	return '0'
}

func clRUT(d []byte) byte {
	s, w := 0, 2
	for i := len(d) - 1; i >= 0; i-- {
		s += int(d[i]-'0') * w
		if w++; w > 7 {
			w = 2
		}
	}
	return "0K987654321"[s%11]
}

func nzIRD(d []byte) bool {
	if len(d) == 8 {
		d = append([]byte{'0'}, d...)
	}
	if n := num(d); n < 10_000_000 || n > 150_000_000 {
		return false
	}
	c := -weighted(d, 3, 2, 7, 6, 5, 4, 3, 2) % 11
	if c < 0 {
		c += 11
	}
	if c == 10 {
		if c = -weighted(d, 7, 4, 3, 2, 5, 2, 7, 6) % 11; c < 0 {
			c += 11
		}
	}
	return c == int(d[8]-'0')
}

// cnRID checks 17 digits against the last character (ISO 7064 MOD 11-2).
func cnRID(d []byte, check byte) bool {
	return validDate(num(d[6:10]), num(d[10:12]), num(d[12:14])) && d[0] != '0' &&
		"10X98765432"[weighted(d, 7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)%11] == check
}

// letterID is a kind of identity number with letters. Form has one sign for each
// character: 9 digit, A letter, X either, other letters for themselves in lower
// case (s: one of +-A-FU-Y, the century of a HETU).
type letterID struct {
	name     string
	form     string
	strength int
	valid    func(s []byte) bool
	// context only.
	needsContext bool
}

var letterIDs = []letterID{
	{name: "us-mbi", form: "9AX9AX9AA99", strength: strong, valid: func(s []byte) bool { return s[0] != '0' && !bytes.ContainsAny(s, "SLOIBZ") }},
	{name: "uk-nino", form: "AA999999A", strength: strong, valid: func(s []byte) bool {
		p := string(s[:2])
		return !bytes.ContainsAny(s[:2], "DFIQUV") && s[1] != 'O' && s[8] <= 'D' && p != "BG" && p != "GB" && p != "NK" && p != "KN" && p != "TN" && p != "NT" && p != "ZZ"
	}},
	{name: "es-dni", form: "99999999A", strength: medium, valid: func(s []byte) bool { return "TRWAGMYFPDXBNJZSQVHLCKE"[num(s[:8])%23] == s[8] }},
	{name: "es-nie", form: "A9999999A", strength: strong, valid: func(s []byte) bool {
		return s[0] >= 'X' && s[0] <= 'Z' && "TRWAGMYFPDXBNJZSQVHLCKE"[(int(s[0]-'X')*10_000_000+num(s[1:8]))%23] == s[8]
	}},
	{name: "it-cf", form: "AAAAAAXXAXXAXXXA", strength: strong, valid: itCF},
	{name: "fr-nir", form: "999992A99999999", strength: strong, valid: nirCorsica},
	{name: "fr-nir", form: "999992B99999999", strength: strong, valid: nirCorsica},
	{name: "de-svnr", form: "99999999A999", strength: medium, valid: func(s []byte) bool {
		d := append(append(append([]byte{}, s[:8]...), '0'+(s[8]-'A'+1)/10, '0'+(s[8]-'A'+1)%10), s[9:]...)
		sum := 0
		for i, w := range []int{2, 1, 2, 5, 7, 1, 2, 1, 2, 1, 2, 1} {
			p := int(d[i]-'0') * w
			sum += p/10 + p%10
		}
		return num(s[2:4])%50 >= 1 && num(s[2:4])%50 <= 31 && num(s[4:6]) <= 12 && sum%10 == int(d[12]-'0')
	}},
	{name: "ie-pps", form: "9999999A", strength: medium, valid: iePPS},
	{name: "ie-pps", form: "9999999AA", strength: medium, valid: iePPS},
	{name: "fi-hetu", form: "999999s999X", strength: strong, valid: func(s []byte) bool {
		return dmy(s) && "0123456789ABCDEFHJKLMNPRSTUVWXY"[(num(s[:6])*1000+num(s[7:10]))%31] == s[10]
	}},
	{name: "in-pan", form: "AAAAA9999A", strength: strong, valid: func(s []byte) bool { return bytes.IndexByte([]byte("ABCFGHLJPT"), s[3]) >= 0 }},
	{name: "cn-rid", form: "99999999999999999x", strength: strong, valid: func(s []byte) bool { return cnRID(s[:17], 'X') }},
	{name: "tw-id", form: "A999999999", strength: medium, valid: func(s []byte) bool {
		c := bytes.IndexByte([]byte("ABCDEFGHJKLMNPQRSTUVXYWZIO"), s[0]) + 10
		return (s[1] == '1' || s[1] == '2' || s[1] == '8' || s[1] == '9') && (c/10+c%10*9+weighted(s[1:], 8, 7, 6, 5, 4, 3, 2, 1, 1))%10 == 0
	}},
	{name: "sg-nric", form: "A9999999A", strength: strong, valid: func(s []byte) bool {
		w := weighted(s[1:], 2, 7, 6, 5, 4, 3, 2)
		switch s[0] {
		case 'S':
			return "JZIHGFEDCBA"[w%11] == s[8]
		case 'T':
			return "JZIHGFEDCBA"[(w+4)%11] == s[8]
		case 'F':
			return "XWUTRQPNMLK"[w%11] == s[8]
		case 'G':
			return "XWUTRQPNMLK"[(w+4)%11] == s[8]
		case 'M':
			return "KLJNPQRTUWX"[10-(w+3)%11] == s[8]
		}
		return false
	}},
	{name: "hk-hkid", form: "A9999999", strength: weak, valid: hkID},
	{name: "hk-hkid", form: "A999999a", strength: medium, valid: hkID},
	{name: "hk-hkid", form: "AA9999999", strength: weak, valid: hkID},
	{name: "cl-rut", form: "99999999k", strength: medium, valid: func(s []byte) bool { return clRUT(s[:8]) == 'K' }},
	{name: "cl-rut", form: "9999999k", strength: medium, valid: func(s []byte) bool { return clRUT(s[:7]) == 'K' }},
	{name: "mx-curp", form: "AAAA999999AAAAAAX9", strength: strong, valid: func(s []byte) bool {
		sum := 0
		for i, b := range s[:17] {
			v := int(b - '0')
			if b >= 'A' {
				v = int(b-'A') + 10
				if b > 'N' {
					v++ // Ñ
				}
			}
			sum += v * (18 - i)
		}
		return ymd(s[4:10]) && (s[10] == 'H' || s[10] == 'M' || s[10] == 'X') && (10-sum%10)%10 == int(s[17]-'0')
	}},
	{name: "mx-rfc", form: "AAAA999999XXX", strength: strong, valid: func(s []byte) bool { return ymd(s[4:10]) }},
	{name: "de-id-card", form: "A99999999", strength: medium, needsContext: true, valid: func([]byte) bool { return true }},
}

func nirCorsica(s []byte) bool {
	d := append([]byte{}, s...)
	n, minus := d[:13], 1_000_000
	if n[6] == 'B' {
		minus = 2_000_000
	}
	n[6] = '0'
	return 97-(num(n)-minus)%97 == num(d[13:]) && (s[0] == '1' || s[0] == '2')
}

func itCF(s []byte) bool {
	odd := [36]int{1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23}
	sum := 0
	for i, b := range s[:15] {
		v := int(b - '0')
		if b >= 'A' {
			v = int(b-'A') + 10
		}
		switch {
		case i%2 == 0:
			sum += odd[v]
		case b >= 'A':
			sum += v - 10
		default:
			sum += v
		}
	}
	return bytes.IndexByte([]byte("ABCDEHLMPRST"), s[8]) >= 0 && byte('A'+sum%26) == s[15]
}

func iePPS(s []byte) bool {
	sum := weighted(s, 8, 7, 6, 5, 4, 3, 2)
	if len(s) == 9 && s[8] != 'W' {
		sum += int(s[8]-'A'+1) * 9
	}
	return (len(s) == 8 || s[8] <= 'I' || s[8] == 'W' || s[8] == 'T') && "WABCDEFGHIJKLMNOPQRSTUV"[sum%23] == s[7]
}

func hkID(s []byte) bool {
	sum, w := 0, 9
	if len(s) == 8 {
		sum = 36 * 9
		w = 8
	}
	for _, b := range s {
		v := int(b - '0')
		if b >= 'A' {
			v = int(b-'A') + 10
		}
		sum += v * w
		w--
	}
	return sum%11 == 0
}

// shaped reports whether s, in upper case, has a form.
func shaped(s []byte, form string) bool {
	if len(s) != len(form) {
		return false
	}
	for i, b := range s {
		digit, letter := b >= '0' && b <= '9', b >= 'A' && b <= 'Z'
		switch f := form[i]; f {
		case '9':
			if !digit {
				return false
			}
		case 'A':
			if !letter {
				return false
			}
		case 'X':
			if !digit && !letter {
				return false
			}
		case 's':
			if b != '+' && b != '-' && !(b >= 'A' && b <= 'F') && !(b >= 'U' && b <= 'Y') {
				return false
			}
		default:
			if f >= 'a' {
				f -= 0x20
			}
			if b != f {
				return false
			}
		}
	}
	return true
}
