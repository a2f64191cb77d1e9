package classify

// luhn is ISO/IEC 7812-1 annex B over digits.
func luhn(d []byte) bool {
	sum, double := 0, false
	for i := len(d) - 1; i >= 0; i-- {
		n := int(d[i] - '0')
		if double {
			if n *= 2; n > 9 {
				n -= 9
			}
		}
		sum += n
		double = !double
	}
	return len(d) > 1 && sum%10 == 0
}

// weighted sums digits times weights.
func weighted(d []byte, w ...int) int {
	sum := 0
	for i := range w {
		sum += int(d[i]-'0') * w[i]
	}
	return sum
}

func num(d []byte) int {
	n := 0
	for _, b := range d {
		n = n*10 + int(b-'0')
	}
	return n
}

// mod11x10 is ISO 7064 MOD 11,10, whose last digit checks the others.
func mod11x10(d []byte) bool {
	p := 10
	for _, b := range d[:len(d)-1] {
		s := (int(b-'0') + p) % 10
		if s == 0 {
			s = 10
		}
		p = s * 2 % 11
	}
	return (11-p)%10 == int(d[len(d)-1]-'0')
}

// ibanLengths by country: the registry of SWIFT (ISO 13616).
var ibanLengths = map[string]int{
	"AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BI": 27, "BR": 29, "BY": 28, "CH": 21, "CR": 22,
	"CY": 28, "CZ": 24, "DE": 22, "DJ": 27, "DK": 18, "DO": 28, "EE": 20, "EG": 29, "ES": 24, "FI": 18, "FK": 18, "FO": 18, "FR": 27, "GB": 22,
	"GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28, "HN": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26, "IT": 27, "JO": 30,
	"KW": 30, "KZ": 20, "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19, "MN": 20,
	"MR": 27, "MT": 31, "MU": 30, "NI": 28, "NL": 18, "NO": 15, "OM": 23, "PK": 24, "PL": 28, "PS": 29, "PT": 25, "QA": 29, "RO": 24, "RS": 22,
	"RU": 33, "SA": 24, "SC": 31, "SD": 18, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "SO": 23, "ST": 25, "SV": 28, "TL": 23, "TN": 24, "TR": 26,
	"UA": 29, "VA": 22, "VG": 24, "XK": 20, "YE": 30,
}

// ibanValid is ISO 7064 MOD 97-10 over upper-case letters and digits.
func ibanValid(s []byte) bool {
	if len(s) < 15 || len(s) > 34 {
		return false
	}
	m := 0
	for i := range s {
		b := s[(i+4)%len(s)]
		switch {
		case b >= '0' && b <= '9':
			m = (m*10 + int(b-'0')) % 97
		case b >= 'A' && b <= 'Z':
			m = (m*100 + int(b-'A') + 10) % 97
		default:
			return false
		}
	}
	return m == 1
}

// cardNetwork reports whether digits begin like a payment card of that length.
func cardNetwork(d []byte) bool {
	n := len(d)
	p2, p4 := num(d[:2]), num(d[:4])
	switch {
	case d[0] == '4':
		return n == 13 || n == 16 || n == 19
	case p2 >= 51 && p2 <= 55, p4 >= 2221 && p4 <= 2720:
		return n == 16
	case p2 == 34 || p2 == 37:
		return n == 15
	case p2 == 36 || p2 == 38 || p2 == 39 || p4 >= 3000 && p4 <= 3059 || p4 == 3095:
		return n == 14 || n == 16
	case p4 == 6011 || p2 == 65 || p4/10 >= 644 && p4/10 <= 649 || p2 == 62 || p2 == 60 || p2 == 81 || p2 == 82:
		return n >= 16 && n <= 19
	case p4 >= 3528 && p4 <= 3589:
		return n >= 16 && n <= 19
	case p4 == 1800 || p4 == 2131:
		return n == 15
	case p4 >= 2200 && p4 <= 2204:
		return n >= 16 && n <= 19
	case p2 == 50 || p2 >= 56 && p2 <= 59 || p2 == 63 || p2 == 67 || p2 == 61 || p2 == 66 || p2 == 68 || p2 == 69 || p4 == 9792:
		return n >= 12 && n <= 19
	}
	return false
}

// validDate reports whether year, month and day can be a birthday; a year of
// two digits is any.
func validDate(y, m, d int) bool {
	return m >= 1 && m <= 12 && d >= 1 && d <= 31 && !(d == 31 && (m == 4 || m == 6 || m == 9 || m == 11)) && !(m == 2 && d > 29) && (y < 100 || y > 1850 && y < 2100)
}

func ymd(d []byte) bool { return validDate(num(d[:2]), num(d[2:4]), num(d[4:6])) }
func dmy(d []byte) bool { return validDate(num(d[4:6]), num(d[2:4]), num(d[:2])) }

// verhoeff is the scheme of J. Verhoeff (1969), with the dihedral group D5.
func verhoeff(d []byte) bool {
	const mul = "0123456789" + "1234067895" + "2340178956" + "3401289567" + "4012395678" + "5987604321" + "6598710432" + "7659821043" + "8765932104" + "9876543210"
	const perm = "0123456789" + "1576283094" + "5803796142" + "8916043527" + "9453126870" + "4286573901" + "2793806415" + "7046913258"
	c := 0
	for i := range d {
		n := int(d[len(d)-1-i] - '0')
		p := int(perm[i%8*10+n] - '0')
		c = int(mul[c*10+p] - '0')
	}
	return c == 0
}
